"""Reasons of coverage: cases that the candidate did not run, and checks that judge no more."""

from __future__ import annotations

from collections.abc import Iterable

from harness.gate.reason import Kind, Reason, Topic
from harness.gate.sides import Pair, Sides
from harness.plural import counted
from harness.result import CaseResult
from harness.verdict import Verdict


def lost_cases(sides: Sides) -> Iterable[Reason]:
    """Every case that the baseline ran and the candidate did not, or could not."""
    for name, before in sides.before.items():
        why = _why_not(sides, name)
        if why and before.ran and before.verdict is not Verdict.INFRA:
            yield Reason(
                kind=Kind.LOST_COVERAGE,
                case=name,
                what=why,
                baseline=before.verdict.value,
                candidate=why,
                command=before.command,
                topics=(Topic.COVERAGE,),
            )


def _why_not(sides: Sides, name: str) -> str:
    """Why the candidate says nothing of a case; empty where it does."""
    after = sides.after.get(name)
    if after is None:
        return "left out, beyond the budget" if name in sides.candidate.start.left_out else "not selected"
    if after.verdict is Verdict.INFRA:
        return f"could not be run: {after.findings[0].first_line if after.findings else 'infra'}"
    return "" if after.ran else "not run"


def unfinished(sides: Sides) -> Iterable[Reason]:
    """A candidate that was interrupted."""
    if sides.candidate.end.interrupted:
        missing = [case for case in sides.candidate.results if not case.ran]
        yield Reason(
            kind=Kind.INTERRUPTED,
            what=f"the candidate was interrupted: {counted(len(missing), 'case')} without a result",
            baseline="interrupted" if sides.baseline.end.interrupted else "ended",
            candidate="interrupted",
            topics=(Topic.COVERAGE,),
            gates=bool(missing) or not sides.baseline.end.interrupted,
        )


def lost_checks(sides: Sides) -> Iterable[Reason]:
    """Every case of which a check was judged that now is not, or that now must be refused."""
    for pair in sides.compared:
        refused = _refused(pair.candidate)
        if refused and not _refused(pair.baseline):
            what = f"it must be refused now ({refused}): nothing else is judged"
            yield _lost(pair, what, (), size=len(pair.baseline.checks))
        elif gone := [name for name in pair.baseline.checks if name not in pair.candidate.checks]:
            reasons = {each.check: each.reason for each in pair.candidate.not_judged}
            details = tuple(f"{name}: {reasons.get(name, 'not judged, without a reason')}" for name in gone)
            yield _lost(pair, f"not judged any more: {', '.join(gone)}", details, size=len(gone))


def _refused(case: CaseResult) -> str:
    """The name of the refusal that a case had to show, and showed."""
    return (case.expectation or "") if case.verdict is Verdict.PASSED else ""


def _lost(pair: Pair, what: str, details: tuple[str, ...], *, size: int) -> Reason:
    return Reason(
        kind=Kind.LOST_CHECK,
        case=pair.id,
        what=what,
        baseline=counted(len(pair.baseline.checks), "check"),
        candidate=counted(len(pair.candidate.checks), "check"),
        size=size,
        command=pair.candidate.command,
        topics=(Topic.CHECKS,),
        details=details,
    )
