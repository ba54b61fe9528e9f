"""Tensors of a run: the operands and results of every module with their distance from a replay, and sketches.

A shard is recorded by `worker/probes/module_tensors.py` on the ranks of a run; a distance by
`worker/one_rank/replay.py` on the single rank that repeats every module on the recorded operands.

A sketch is SKETCH_SIZE signed sums of all elements of the logical tensor. The sign of an element depends only on its
position. Sketches are linear: the shards' add up to the tensor's, and the distance between two sketches
estimates the distance between their tensors within about a quarter. Recorded by `worker/probes/sketches.py`.
"""

from collections.abc import Mapping
from typing import Literal

from harness.trace.record import Record

# input, output: of the forward pass. grad_output, grad_input: of the backward pass. grad, param: of a parameter, after
# the sum over data-parallel ranks, and after the optimizer step.
ModuleTensorKind = Literal["input", "output", "grad_output", "grad_input", "grad", "param"]

FLOAT8 = "float8"  # the dtype of an operand that its module got in float8: it cast nothing, and nothing is compared


class ModuleShard(Record, frozen=True, kw_only=True):
    """What one rank held of one tensor of one module or parameter.

    `data` is None on every rank but one of those that hold the same shard; `digest` is of the same bytes. `summed`: the
    shards of the ranks add up to the logical tensor; otherwise each is a part of it, at `offset`.
    """

    step: int  # 1-based
    fqn: str  # of the module, or of the parameter for grad and param
    call: int = 0  # of the module in this step, from 0
    kind: ModuleTensorKind
    dtype: str
    shape: tuple[int, ...] = ()  # of the logical tensor; it and the others stay empty for FLOAT8
    offset: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()
    summed: bool = False
    digest: str = ""
    data: bytes | None = None


class SumTerms(Record, frozen=True, kw_only=True):
    """What ranks use instead of the sum of their outputs: a multiple of the output of each rank.

    `weights`: for each rank that uses it, these multiples in the order of `ranks`.
    """

    fqn: str  # of the module
    ranks: tuple[int, ...]
    weights: Mapping[int, tuple[float, ...]]


class ModuleDistance(Record, frozen=True, kw_only=True):
    """One tensor of a parallel run against the replay: |run - replay| / |replay|, NaN where they cannot be compared.

    `spread`: how much larger than the tensor the parts are that were summed over ranks: the root of the sum of their
    squared norms, over the norm of the tensor. 0: it was not summed. `tail`: the share of its squared norm that is not
    in the largest element of every row.
    """

    step: int  # 1-based
    part: int | None  # the data-parallel rank whose tokens it belongs to; None for gradients and parameters
    fqn: str
    call: int = 0
    kind: ModuleTensorKind
    dtype: str
    distance: float
    spread: float
    parts: int  # how many shards were summed; 1 for a tensor that was not
    of_ranks: Mapping[int, float] = {}  # of what each rank has of it, or of its part of a sum
    terms: SumTerms | None = None  # what it has of a sum instead, where that explains the distance
    problem: str | None = None  # why there is none: missing on one side, another form, unequal replicas
    tail: float = 0.0


SKETCH_SIZE = 32

# initial: a parameter before the first step. param: after the optimizer step.
SketchKind = Literal["initial", "grad", "param"]


class TensorSketch(Record, frozen=True, kw_only=True):
    """One rank's shard of one gradient or parameter at one step.

    `owner` is True on exactly one of the ranks that hold the same shard: `sums` and `norm_squared` of owners add up to
    those of the logical tensor. Replicas of the same shard (`offset`) must have the same `digest`.
    """

    fqn: str
    kind: SketchKind
    step: int
    shape: tuple[int, ...]  # of the logical tensor
    offset: tuple[int, ...]  # of this rank's shard
    local_shape: tuple[int, ...]
    owner: bool
    norm_squared: float
    sums: bytes  # SKETCH_SIZE little-endian float64
    digest: str  # of the bytes of this rank's shard, or of `parts`
    parts: tuple[str, ...] = ()  # with replicas: digests of as many equal parts of it, the shards of FSDP2 alone
    cut: int = 0  # the dim along which FSDP2 shards it, and parts are cut
