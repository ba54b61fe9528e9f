"""How ranks failed: a finding for ranks that failed alike, or that are stuck at the same place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.checks.advice import advice
from harness.checks.rule import Rules, Stage
from harness.checks.stacks import OwnFrame, StackLocation, main_stack, own_frame, place_of
from harness.sentence import format_ranks
from harness.trace import RankFailure, Run
from harness.verdict import Finding

ENGINE = "engine"  # in place of a check, in findings about ranks that did not finish

_rule = Rules("engine")
UNKNOWN = _rule("unknown", Stage.RUN, "the engine reports {status}, but no rank reports a cause")
RAISED = _rule("raised", Stage.RUN, "{ranks} {end}", key=("error",))
STUCK = _rule("stuck", Stage.RUN, "{ranks} {end}")
LOST = _rule("lost", Stage.RUN, "{ranks} {end}")
REPORT = _rule("report", Stage.RUN, "{report}")
RULES = _rule.declared

_CALLED = ",\n    called from "


class _Kind(NamedTuple):
    """What ranks that failed alike have in common. `place`: of a rank that is stuck; `own`: of one that raised."""

    kind: str
    phase: str
    message: str
    place: StackLocation | None
    own: OwnFrame | None

    def __str__(self) -> str:
        backward = ", backward" if self.place is not None and self.place.backward else ""
        at = f", at {self.own}" if self.own is not None else ""
        what = self.place or f"{advice(self.message).what}{at}"
        return f"{self.kind}{f' in {self.phase}' if self.phase else ''}{backward}: {what}"

    @property
    def found(self) -> str:
        """What is found instead of ranks that return."""
        return self.kind if self.place is None else f"{self.kind} in {_CALLED.join(map(str, self.place.calls))}"

    @property
    def waits(self) -> bool:
        """True if the ranks wait for others: they are not the cause."""
        return self.place is not None and bool(self.place.collective)


def failures(run: Run, status: str) -> tuple[Finding, ...]:
    """How the ranks failed. Consequences only where no cause is known.

    Of stuck ranks those come first that wait for no other, then those of which there are fewest. The first finding then
    says what the other ranks do.
    """
    groups = _groups(run.causes or run.failures)
    if not groups:
        return (UNKNOWN.finding(status=status),)
    return tuple(
        {"raised": RAISED, "stuck": STUCK}.get(kind.kind, LOST).finding(
            end=f"{kind}{_others(run, groups) if kind.place and not index else ''}",
            error=kind.message,
            ranks=ranks,
            expected="every rank returns",
            found=kind.found,
            fix=advice(kind.message).fix,
        )
        for index, (kind, ranks) in enumerate(groups)
    )


def _groups(causes: Iterable[RankFailure]) -> list[tuple[_Kind, list[int]]]:
    groups: dict[_Kind, list[int]] = {}
    for failure in sorted(causes, key=lambda failure: failure.rank):
        place = place_of(main_stack(failure.traceback)) if failure.kind == "stuck" else None
        own = own_frame(failure.traceback) if failure.kind == "raised" else None
        groups.setdefault(_Kind(failure.kind, failure.phase, failure.message, place, own), []).append(failure.rank)
    stuck = any(kind.place for kind in groups)
    return sorted(groups.items(), key=lambda group: (group[0].waits, len(group[1]))) if stuck else list(groups.items())


def _others(run: Run, groups: list[tuple[_Kind, list[int]]]) -> str:
    """What the ranks do that are not in the first group."""
    does = [
        f"{format_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {kind.place.collective}"
        for kind, ranks in groups[1:]
        if kind.place is not None and kind.place.collective
    ]
    returned = [trace.rank for trace in run.traces]
    return "".join(f"; {each}" for each in (*does, *([f"{format_ranks(returned)} returned"] if returned else [])))
