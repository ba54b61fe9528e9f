"""What a rank did in a step, counted: FLOPs, collectives, memory; the same as simulated; and what became of tokens.

Recorded by the probes `flops`, `traffic`, `saved_memory` and `experts`.
"""

from typing import Literal

from harness.trace.record import Record

FLOAT8 = "float8"  # a precision; the others are dtypes


def multiplied_words(*, part: str, precision: str) -> str:
    """Return the key of products in words: "matmuls in float8", "attention in bfloat16"."""
    return f"{part} in {precision}"


class FlopsRecord(Record, frozen=True, kw_only=True):
    """Operators of one kind in one step, evaluation and recomputation included.

    A multiplication and an addition are 2 FLOPs; fused attention has 2 products in forward and 4 in backward.
    """

    step: int
    part: str  # "matmuls" or "attention"
    precision: str  # "float8", or the dtype of the factors
    calls: int
    flops: int


def collective_words(*, axis: str, kind: str, op: str, dtype: str) -> str:
    """Return the key of collectives in words: "all_reduce (max) in float64 along tp"."""
    return f"{kind}{f' ({op})' if op else ''} in {dtype} along {axis}"


class TrafficRecord(Record, frozen=True, kw_only=True):
    """The collectives of one kind over one mesh axis in one step.

    `payload_bytes` is the sum of this rank's inputs: the shard for all_gather, the full input for reduce_scatter and
    all_reduce. `sizes` counts the collectives by the elements of that input: an amax of tensorwise scaling has 1.
    """

    step: int
    axis: str  # "dp_shard", "dp_replicate", "tp", "world", or several joined by "+"
    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", ...
    op: str = ""  # "sum", "max", ... of a reduction: every "max" is an amax or the largest logit
    dtype: str  # "float32", "bfloat16", "uint8" for float8 gathered as bytes by FSDP2, ...
    payload_bytes: int
    sizes: dict[int, int]
    starts: tuple[tuple[float, int], ...] = ()  # of the last step: seconds since it began, and bytes, of every call

    @property
    def words(self) -> str:
        return collective_words(axis=self.axis, kind=self.kind, op=self.op, dtype=self.dtype)


Moment = Literal["forward", "step"]
MOMENTS: dict[Moment, str] = {"forward": "between forward and backward", "step": "at the end of the step"}


class LiveTensor(Record, frozen=True, kw_only=True):
    """A storage of more than one element that is alive and not explained, as one of the tensors that hold it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # of the storage
    holder: str  # the module attribute that holds it, such as "layers.0.kept"; empty if no module does


class LiveMemory(Record, frozen=True, kw_only=True):
    """What is alive on this rank that neither the model, the optimizer, the data nor autograd explains.

    `moment`: "forward" is between forward and backward, where gathered weights count too; "step" is the end of a step.
    """

    moment: Moment
    scalars: int  # storages of one element
    tensors: tuple[LiveTensor, ...]


class SavedMemory(Record, frozen=True, kw_only=True):
    """What autograd saved for the backward pass of one step on this rank, without parameters, buffers and tokens."""

    step: int
    saved_bytes: int  # of distinct storages
    by_dtype: dict[str, int]
    live: tuple[LiveMemory, ...] = ()  # what is alive besides: at the end of forward and of the step


# Tokens of experts

Phase = Literal["forward", "recompute", "evaluation"]


class Rows(Record, frozen=True, kw_only=True):
    """Digests of rows, int64 each: before and behind the exchange of tokens, and of the exchange of results.

    A rank sends `sent` by expert, and `arrived` are those for its own experts; these return `computed`, and the rank
    that sent the token gets `returned`.
    """

    sent: bytes = b""
    arrived: bytes = b""
    computed: bytes = b""
    returned: bytes = b""


class ExpertCall(Record, frozen=True, kw_only=True):
    """One call of the experts of a block. `number` counts the calls of a phase and step, from 0."""

    step: int
    fqn: str  # of the block's mixture: "layers.1.moe"
    phase: Phase
    number: int
    tokens: bytes  # digests of those that the router got, int64
    chosen: bytes  # experts [tokens, top_k], int64
    weights: bytes  # of them, float64
    counts: tuple[int, ...]  # rows of every expert of the block, as the experts were called
    local_counts: tuple[int, ...]  # rows of every expert of this rank
    values: Rows
    gradients: Rows = Rows()  # of forward alone


class ExpertBias(Record, frozen=True, kw_only=True):
    """The bias of the choice of experts behind the update of a step."""

    step: int
    fqn: str
    bias: tuple[float, ...]


class GroupedMatmuls(Record, frozen=True, kw_only=True):
    """Grouped matmuls of one step. `wgrad`: of weight gradients; the others are of forward and of dgrad."""

    step: int
    wgrad: bool
    scaled: bool  # of float8 operands
    times: int


class ExpertTrace(Record, frozen=True, kw_only=True):
    calls: tuple[ExpertCall, ...]  # in order of execution
    matmuls: tuple[GroupedMatmuls, ...] = ()
    biases: tuple[ExpertBias, ...]
