"""Reasons of required cells: what a release must have shown, and the candidate did not show, or not lately."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from harness.gate.reason import Kind, Reason
from harness.gate.sides import Sides
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import Required
from harness.plural import counted
from harness.result import CaseResult, RunResult

_DAY_S = 24 * 3600


def required_cells(sides: Sides, entries: Sequence[Required], now: datetime.datetime) -> Iterable[Reason]:
    """A reason for every entry that the candidate does not meet. Quarantine excuses none of them."""
    for entry in entries:
        found = _of(entry, sides.candidate)
        good = [case for case in found if case.good and case.checks]
        stale = _too_old(entry, sides.candidate.start.started, now)
        if stale or len(good) < entry.at_least:
            before = sum(case.good for case in _of(entry, sides.baseline))
            yield Reason(
                kind=Kind.REQUIRED,
                case=entry.id or None,
                what=f"{entry.name}: {stale or _too_few(entry, len(good))}",
                baseline=f"{before} good",
                candidate=f"{len(good)} good",
                size=entry.at_least - len(good),
                command=next((case.command for case in found if case not in good), ""),
                details=(f"required: {entry.reason}", f"cases: {entry.which}", *_why(found, good)),
            )


def _of(entry: Required, run: RunResult) -> list[CaseResult]:
    return [case for case in run.results if entry.covers(parse_case_id(case.case_id))]


def _too_few(entry: Required, good: int) -> str:
    return f"{good} of at least {counted(entry.at_least, 'case')} good"


def _too_old(entry: Required, started: str, now: datetime.datetime) -> str:
    """How old the run is, where that is older than allowed or not known; else empty."""
    if entry.max_age_days is None:
        return ""
    if not started:
        return "it is not known when it was run"
    days = (now - datetime.datetime.fromisoformat(started)).total_seconds() / _DAY_S
    return f"run {days:.1f} days ago, at most {entry.max_age_days:g} allowed" if days > entry.max_age_days else ""


def _why(found: Sequence[CaseResult], good: Sequence[CaseResult]) -> Iterable[str]:
    """What the cases that do not count ended with."""
    if not found:
        yield "none of them was selected"
    for case in found:
        if case not in good:
            yield f"{case.case_id}: {'judged by no check' if case.good else case.verdict.value}"
