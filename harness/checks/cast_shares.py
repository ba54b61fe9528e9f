"""Cast shares: how many values the casts of every operand lost, added up over ranks and phases.

They are what is kept of the operands of a solo witness, which are too many for memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, CastShare


def cast_shares(traces: Iterable[RankTrace]) -> tuple[CastShare, ...]:
    """How many values casts lost over all ranks and phases: one record for every form of every operand and step."""
    sums: dict[tuple[object, ...], list[CastRecord]] = {}
    for cast in (cast for trace in traces if trace.operands is not None for cast in trace.operands.casts):
        sums.setdefault((cast.step, cast.fqn, cast.role, cast.axiswise_dim, cast.target_dtype), []).append(cast)
    return tuple(_added(casts) for casts in sums.values() if any(cast.elements for cast in casts))


def _added(casts: list[CastRecord]) -> CastShare:
    return CastShare(
        **{name: getattr(casts[0], name) for name in ("step", "fqn", "role", "axiswise_dim", "target_dtype")},
        **{name: sum(getattr(cast, name) for cast in casts) for name in ("elements", "flushed", "saturated")},
    )


def with_cast_shares(run: Run) -> Run:
    """A solo witness with what its casts lost in place of its operands."""
    (trace,) = run.traces
    if trace.operands is None:
        return run
    return replace(run, traces=(replace(trace, operands=None, cast_shares=cast_shares(run.traces)),))
