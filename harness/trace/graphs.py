"""Graphs: what the compiler made of the blocks, and what the fused operators of async TP did.

Recorded by `worker/probes/graphs.py`, of compiled runs only.
"""

from __future__ import annotations

from typing import Literal

from harness.trace.operands import ScaleSummary
from harness.trace.record import Record

Collective = Literal["all_gather", "reduce_scatter"]
Phase = Literal["forward", "backward"]


class FusedNode(Record, frozen=True, kw_only=True):
    """One fused operator in a graph. Shapes are those of this rank; scales are None where the operator has none."""

    operator: str  # "fused_scaled_matmul_reduce_scatter", ...
    collective: Collective
    axis: str  # the mesh axis of its group
    a_shape: tuple[int, ...]
    a_scale_shape: tuple[int, ...] | None
    matmuls: int  # how many it computes: an all-gather feeds several
    dim: int  # along which is gathered or scattered, of the tensor before it was flattened
    flat_dim: int | None = None  # the same of A, where the operator has both


class Unfused(Record, frozen=True, kw_only=True):
    """One collective of the TP axis that was left as it was, and why, as far as the graph tells."""

    collective: Collective
    axis: str
    shape: tuple[int, ...]
    dtype: str
    reason: str


class GraphRecord(Record, frozen=True, kw_only=True):
    """One compiled graph. Blocks of the same kind share one."""

    phase: Phase
    fused: tuple[FusedNode, ...]
    unfused: tuple[Unfused, ...]
    matmuls: int  # mm and _scaled_mm outside of fused operators


class WrongRow(Record, frozen=True, kw_only=True):
    """A row of a fused operator's result on this rank that is not its reference's. Indices leave the last dim out."""

    index: tuple[int, ...]
    distance: float  # relative to the reference row
    holds_rank: int | None  # position in the group and index of the reference row that it holds instead, if any
    holds_index: tuple[int, ...] | None


class FusedCall(Record, frozen=True, kw_only=True):
    """Executions of one fused operator with the same shapes in one phase of one step, against torch's reference.

    `worst`: the largest relative distance of a row of any of its results to the reference row, over all executions.
    `wrong_rows` counts rows that are further away than rounding explains, `example` is the first of them.
    """

    step: int  # 1-based
    phase: Phase
    operator: str
    collective: Collective
    times: int
    matmuls: int  # scaled or not, of one execution
    scaled: bool
    rows: int
    worst: float
    wrong_rows: int
    example: WrongRow | None


class GraphCast(Record, frozen=True, kw_only=True):
    """One cast to float8 that a graph executed. Numbers are of the local tensor, as in `trace/operands.py`."""

    step: int  # 1-based
    order: int  # within the step, from 1: the same cast on every rank of a TP group has the same
    phase: Phase
    fqn: str  # as the compiler names the module: blocks of one kind share a graph, so not which block it was
    is_weight: bool
    shape: tuple[int, ...]
    target_dtype: str
    scale: ScaleSummary
    amax: float
    scaled_amax_minimum: float
    scaled_amax_maximum: float
    saturated: int
    nonfinite: int
    mismatched: int
    elements: int


class GraphTrace(Record, frozen=True, kw_only=True):
    """Everything recorded about compilation on one rank."""

    graphs: tuple[GraphRecord, ...]
    calls: tuple[FusedCall, ...]
    casts: tuple[GraphCast, ...] | None  # None where code was generated, which nothing can look into
    workarounds: tuple[str, ...]  # limits of torch on a CPU that the virtual device worked around
