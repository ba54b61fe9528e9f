"""What the harness found out about a target and its tensors, and what that was called with.

Names are FQNs without what checkpointing wrappers and compilation add. Sequences are numbered in the global batch of
their step. A shard is recorded on the ranks of a run; a distance by `worker/one_rank/replay.py` on the single rank that
repeats every module on the recorded operands.

A sketch is SKETCH_SIZE signed sums of all elements of the logical tensor. The sign of an element depends only on its
position. Sketches are linear: the shards' add up to the tensor's, and the distance between two sketches
estimates the distance between their tensors within about a quarter. Recorded by `worker/probes/sketches.py`.
"""

from collections.abc import Mapping
from typing import Literal

from harness.trace.record import Record


class Linear(Record, frozen=True, kw_only=True):
    """One `nn.Linear`, converted or not. Sizes are those of the whole linear."""

    fqn: str
    in_features: int
    out_features: int
    converted: bool  # it is a Float8Linear
    tied: bool = False  # a module that is no linear has the same weight, as an embedding may have
    own_forward: bool = False  # it is a Float8Linear of the target, which may keep casts of its weight


class Parameter(Record, frozen=True, kw_only=True):
    """One parameter: the logical shape, and what this rank holds of it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str  # of what is stored, such as "float32" for the master weights of mixed precision
    local_elements: int
    axes: tuple[str, ...]  # mesh axes that it is distributed over, sharded or replicated
    trained: bool  # requires_grad
    offset: tuple[int, ...] = ()  # of what this rank holds
    built: str = ""  # digest of what the target had put there before the harness wrote its own weights, where asked for
    updated: bool = True  # training changed it


class Buffer(Record, frozen=True, kw_only=True):
    """One buffer, as the target built it: the harness writes parameters only."""

    fqn: str
    shape: tuple[int, ...]  # of what this rank holds
    dtype: str
    digest: str
    changed: bool = False  # training changed it


class Options(Record, frozen=True, kw_only=True):
    """What an optimizer has for options of these parameters, with the dtypes of them and of what it keeps, as text."""

    names: tuple[str, ...]  # FQNs, or what they are where they are not of the model
    values: dict[str, str]


class StepUpdate(Record, frozen=True, kw_only=True):
    """What optimizers did in one step: to parameters with gradients, none where `updated` is False.

    `distance`: the largest of any value that was looked at from the formula of the optimizer, in roundings of it.
    """

    step: int  # 1-based
    updated: bool = False
    options: tuple[Options, ...] = ()  # empty if they are those of the step before
    fqn: str = ""  # of the parameter whose values, or those of what is kept of it, are furthest off
    what: str = ""  # "param", "exp_avg"
    distance: float = 0.0


class ModelRecord(Record, frozen=True, kw_only=True):
    """Linears in registration order, parameters in the order of `named_parameters`, checkpointed and compiled FQNs.

    `calls`: how often the forward of a linear ran in a step at most, by FQN, in eager runs; `recomputed`: and again in
    backward. `constants`: of those that modules of torch declare what is no size, as text, by "norm.eps".
    """

    linears: tuple[Linear, ...]
    parameters: tuple[Parameter, ...]
    checkpointed: tuple[str, ...]
    compiled: tuple[str, ...]
    calls: dict[str, int]
    recomputed: dict[str, int]
    buffers: tuple[Buffer, ...] = ()
    constants: Mapping[str, str] = {}
    updates: tuple[StepUpdate, ...] = ()


class StepInputs(Record, frozen=True, kw_only=True):
    step: int
    inputs: tuple[int, ...]  # the sequences whose tokens it got, in the order of calls
    labels: tuple[int, ...]  # the sequences whose tokens it got shifted by one: they are what it must predict
    covered: float  # share of the neighboring tokens that are meant for this rank, among all that the model got
    shapes: tuple[tuple[int, ...], ...]  # of the integer tensors


class StateChange(Record, frozen=True, kw_only=True):
    """A setting of torch, which belongs to the whole process, that the target left changed."""

    name: str  # "default dtype"
    phase: str  # after which it was found: "import", "build", "step 1"
    before: str
    after: str


# A value for every parameter, all that an optimizer keeps of it, and its options: "norm.weight", "norm.weight exp_avg",
# "norm.weight lr". It is dtype, shape and digest of the whole tensor, whatever its layout, or the value itself.
State = dict[str, str]


class Resumed(Record, frozen=True, kw_only=True):
    """The state that was saved, and the one of every target that loaded it; the last of these trains on.

    `wrong`: for each of them what this rank itself holds of it and was not saved so.
    """

    after_step: int
    saved: State
    loaded: tuple[State, ...]
    wrong: tuple[tuple[str, ...], ...] = ()


# Tensors

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
