"""Graphs: the compiled graphs of the blocks, and the results of the fused operators of async TP.

Recorded by `worker/probes/graphs.py`, for compiled runs only.
"""

from typing import Literal

from harness.trace.operands import CastStatistics, ScaleSummary
from harness.trace.record import Record

Collective = Literal["all_gather", "reduce_scatter"]
Phase = Literal["forward", "backward"]
# a, b and their scales: operands of a scaled matmul. result: what a graph returns.
GeneratedTensor = Literal["a", "b", "scale of a", "scale of b", "result"]


class FusedNode(Record, frozen=True, kw_only=True):
    """One fused operator in a graph. Shapes are those of this rank; scale shapes are None for unscaled operators."""

    operator: str  # "fused_scaled_matmul_reduce_scatter", ...
    collective: Collective
    axis: str  # the mesh axis of its process group
    a_shape: tuple[int, ...]
    a_scale_shape: tuple[int, ...] | None


class Unfused(Record, frozen=True, kw_only=True):
    """One collective of the TP axis that was not fused, and why, as far as the graph shows."""

    collective: Collective
    axis: str
    shape: tuple[int, ...]
    dtype: str
    reason: str


class GraphRecord(Record, frozen=True, kw_only=True):
    """One compiled graph. Blocks with the same code share it."""

    phase: Phase
    fused: tuple[FusedNode, ...]
    unfused: tuple[Unfused, ...]
    constants: tuple[str, ...] = ()  # operators with the fractions that they are given, in order: "aten::mul 0.125"


class WrongRow(Record, frozen=True, kw_only=True):
    """A row of a fused operator's result that differs from the reference row. Indices leave out the last dim."""

    index: tuple[int, ...]
    distance: float  # relative to the reference row
    holds_rank: int | None  # the rank in the group whose reference row it holds instead, if any
    holds_index: tuple[int, ...] | None  # the index of that row


class FusedCall(Record, frozen=True, kw_only=True):
    """Executions of one fused operator with the same shapes in one phase of one step, against torch's reference.

    `wrong_rows` counts result rows that are further from their reference row than rounding explains; `example` is the
    first of them.
    """

    step: int  # 1-based
    phase: Phase
    operator: str
    collective: Collective
    times: int
    rows: int
    wrong_rows: int
    example: WrongRow | None


class GraphCast(CastStatistics, frozen=True, kw_only=True):
    """One cast to float8 that a graph executed."""

    step: int  # 1-based
    order: int  # within the step, from 1; equal for the same cast on every rank of a TP group
    phase: Phase
    fqn: str  # as the compiler names the module: blocks share a graph, so it does not say which block
    is_weight: bool
    scale_is_given: bool = False  # the scale is an input of the graph: of a cast that is computed again in backward
    shape: tuple[int, ...]


class GraphMatmul(Record, frozen=True, kw_only=True):
    """One scaled matmul that a graph executed."""

    step: int  # 1-based
    order: int  # of the cast before it
    phase: Phase
    fqn: str
    a_scale: ScaleSummary  # the inverse of the scale of the cast, as in torch._scaled_mm
    b_scale: ScaleSummary
    a_casts: tuple[int, ...]  # those of this step, by their order, whose float8 values the operand has, in any order
    b_casts: tuple[int, ...]


class GeneratedResult(Record, frozen=True, kw_only=True):
    """A tensor of generated code beside the same one of its graph, repeated operator by operator on the same inputs.

    The repetition goes on with what the code multiplied, so that nothing accumulates from matmul to matmul.
    """

    step: int  # 1-based
    order: int  # within the step, from 1
    phase: Phase
    fqn: str  # as in `GraphCast`
    tensor: GeneratedTensor
    dtype: str
    distance: float  # relative to the norm of the tensor; NaN where the code has no such tensor
    farthest_row: float  # relative to the norm of its row, or of a mean row if this is larger
    cancelled: float = 1.0  # of a sum: the norm of its terms relative to its own, where that is larger


class GradientDistance(Record, frozen=True, kw_only=True):
    """The gradient of a parameter beside the one that generated code returned for it, added up over the same ranks."""

    step: int  # 1-based
    fqn: str  # of the parameter
    distance: float  # relative to the norm of this rank's shard; NaN where the code returned none
    summed_over_tp: bool = False  # TP ranks have the sum of what each of them returned


class UnknownCast(Record, frozen=True, kw_only=True):
    """A conversion to float8 that a graph executed and that is not torchao's cast: widen, scale, clamp, convert."""

    step: int  # 1-based
    order: int  # as in `GraphCast`
    phase: Phase
    fqn: str
    target_dtype: str
    shape: tuple[int, ...]
    missing: str  # the operator that should stand there, and the one that does


class KeptTensor(Record, frozen=True, kw_only=True):
    """A result that checkpointing must compute again and that a forward graph saves for backward all the same."""

    node: str  # its name in the graph
    operator: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class UnequalNode(Record, frozen=True, kw_only=True):
    """A node of a backward graph that repeats one of the forward graph, and is not the same."""

    node: str
    moment: Literal["partition", "passes"]  # after which it differs
    forward: str  # operator and arguments
    backward: str


class PartitionRecord(Record, frozen=True, kw_only=True):
    """How one joint graph was divided into a forward and a backward graph. Blocks with the same code share it."""

    forward: int  # operators of the forward graph
    marked: int  # of them those that checkpointing marks to be computed again
    saved_bytes: int  # of intermediate results, as single tensors: views of one storage count each
    kept: tuple[KeptTensor, ...]  # of them what is marked to be computed again
    repeated: int  # operators of the forward graph that the backward graph repeats
    repeated_in_passes: int  # those that both graphs still have after the passes
    unequal: tuple[UnequalNode, ...]


class GraphTrace(Record, frozen=True, kw_only=True):
    """Everything recorded about compilation on one rank."""

    graphs: tuple[GraphRecord, ...]
    calls: tuple[FusedCall, ...]
    casts: tuple[GraphCast, ...]
    unknown_casts: tuple[UnknownCast, ...] = ()
    matmuls: tuple[GraphMatmul, ...] = ()
    generated: tuple[GeneratedResult, ...] = ()  # of code that inductor generates
    gradients: tuple[GradientDistance, ...] = ()  # of parameters that this code is given
    emulates_roundings: bool = False  # this code rounds where its graph does
    partitions: tuple[PartitionRecord, ...] = ()  # in the order of compilation
    workarounds: tuple[str, ...]  # limits of torch on a CPU that the virtual device worked around
