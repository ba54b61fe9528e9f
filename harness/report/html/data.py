"""What the script of the page shows: an index of all cases, and the details of each, which it reads when it is opened.

Texts are those of the other reports; axes have their values in order; the casts of a case are one row an operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from harness.checks.catalogue import CHECKS
from harness.checks.causes import first_effect
from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_values, choices, own_axes, shown_value
from harness.matrix.case import Case
from harness.matrix.caseid import mesh_words, parse_case_id
from harness.measured import CastRange, Curve, Sent
from harness.report.case import distances, headline, outcome, retried
from harness.report.sections import Table, printable
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Finding, NotJudged, Verdict

_LAYOUT = "layout"  # the mesh in words: what people compare first, and no axis of its own
_DIGITS = 3  # significant ones of what casts have
# The worst first: of a cell of the heat map the worst verdict counts.
_WORST_FIRST = (
    Verdict.CRASH,
    Verdict.HANG,
    Verdict.INVARIANT,
    Verdict.NUMERIC,
    Verdict.CHANGED,
    Verdict.UNEXPECTED_PASS,
    Verdict.INFRA,
    Verdict.NOT_RUN,
    Verdict.KNOWN,
    Verdict.PASSED,
)


class VerdictWord(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict and what it means."""

    name: str
    phrase: str
    good: bool


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """An axis on which the cases differ, with the values that they have, in order."""

    name: str
    values: tuple[str, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A case in the list. `at`: the number of its value on every axis; empty where its id cannot be read."""

    id: str
    verdict: str
    ranks: int
    seconds: float
    note: str = ""
    at: tuple[int, ...] = ()
    found: tuple[str, ...] = ()  # checks with findings
    unjudged: tuple[str, ...] = ()


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """All cases, and what they are filtered by."""

    verdicts: tuple[VerdictWord, ...]  # the worst first
    axes: tuple[Axis, ...]
    meanings: Mapping[str, str]  # of all axes
    cases: tuple[Row, ...]
    checks: Mapping[str, tuple[str, str]]  # what each asks, and what it cannot see


class FindingText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finding. `effect`: it is likely to be an effect of those before it."""

    rule: str
    message: str
    place: str = ""
    expected: str = ""
    found: str = ""
    fix: str = ""
    effect: bool = False


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks failed in the same way."""

    head: str
    text: str


class Casts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The casts of one operand of a linear, one number a step; None where it was not cast."""

    fqn: str
    role: str
    amax: tuple[float | None, ...]
    low: tuple[float | None, ...]  # the smallest scale
    high: tuple[float | None, ...] = ()  # the largest; empty where there is one scale in every step
    saturated: tuple[float | None, ...] = ()  # empty where nothing is
    flushed: tuple[float | None, ...] = ()


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything else about a case."""

    outcome: str
    command: str = ""
    axes: tuple[tuple[str, str], ...] = ()  # name and value of what is not at its default
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[FindingText, ...] = ()
    signature: str = ""
    curves: Mapping[str, Curve] = {}
    allowed: tuple[float, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    casts: tuple[Casts, ...] = ()
    wire: tuple[tuple[str, Sent | None, Sent | None], ...] = ()  # what, found, by the formula
    saved: tuple[int | None, int | None] = (None, None)  # found, by the formula
    fused: Mapping[str, int] = {}
    checks: tuple[str, ...] = ()
    unjudged: tuple[NotJudged, ...] = ()
    stacks: tuple[Stack, ...] = ()
    fixed: tuple[FindingText, ...] = ()  # what the run with the candidate fix found
    history: Table | None = None


class Known(NamedTuple):
    """A case of the run with what its id says."""

    case: CaseResult
    read: Case | None  # None for an id that this version cannot read
    axes: Mapping[str, object]  # empty for such an id


def index_and_details(run: RunResult, history: Mapping[str, Table]) -> tuple[Index, tuple[Detail, ...]]:
    """The index of a run and the details of its cases, in the same order: the worst verdicts first."""
    cases = [(case, _read(case.case_id)) for case in run.results]
    known = [Known(case, read, _all_axes(read)) for case, read in cases]
    known.sort(key=lambda each: _WORST_FIRST.index(each.case.verdict))
    axes = tuple(_axes([each.axes for each in known if each.axes]))
    index = Index(
        verdicts=tuple(VerdictWord(name=each.value, phrase=each.phrase, good=each.good) for each in _WORST_FIRST),
        axes=axes,
        meanings={_LAYOUT: "ranks of every mesh axis", **{name: axis.meaning for name, axis in DECLARED.items()}},
        cases=tuple(_row(each, axes) for each in known),
        checks={check.name: (check.question, check.sight) for check in CHECKS},
    )
    return index, tuple(_detail(each, history.get(each.case.case_id)) for each in known)


def _read(text: str) -> Case | None:
    """The case of an id; None for one that this version cannot read."""
    try:
        return parse_case_id(text)
    except HarnessError:
        return None


def _all_axes(case: Case | None) -> Mapping[str, object]:
    return {} if case is None else {_LAYOUT: mesh_words(case.layout), **axis_values(case)}


def _axes(cases: Sequence[Mapping[str, object]]) -> Iterable[Axis]:
    """The axes on which the cases differ."""
    for name in (_LAYOUT, *AXES):
        values = list(dict.fromkeys(each[name] for each in cases))
        if len(values) > 1:
            ordered = sorted(values, key=lambda value: _order(name, value))
            yield Axis(name=name, values=tuple(map(shown_value, ordered)))


def _order(name: str, value: object) -> tuple[int, float, str]:
    """Numbers by size, named choices as they are listed, words by the alphabet."""
    listed = ("single",) if name == _LAYOUT else choices(name)
    if value in listed:
        return 0, listed.index(value), ""
    if isinstance(value, int | float):
        return 1, value, ""
    return 2, 0, shown_value(value)


def _row(each: Known, axes: Sequence[Axis]) -> Row:
    case = each.case
    return Row(
        id=printable(case.case_id),
        verdict=case.verdict.value,
        ranks=case.world_size,
        seconds=round(case.seconds, 1),
        note=headline(case),
        at=tuple(axis.values.index(shown_value(each.axes[axis.name])) for axis in axes) if each.axes else (),
        found=tuple(dict.fromkeys(finding.check for finding in case.findings)),
        unjudged=tuple(dict.fromkeys(skipped.check for skipped in case.not_judged)),
    )


def _detail(each: Known, history: Table | None) -> Detail:
    case, measured = each.case, each.case.measured
    own = own_axes(each.read) if each.read is not None else {}
    plain = {"case": Curve(losses=case.losses, grad_norms=case.grad_norms)} if case.losses else {}
    return Detail(
        outcome=outcome(case),
        command=printable(case.command),
        axes=tuple((name, shown_value(value)) for name, value in own.items()),
        facts=tuple(_facts(each)),
        findings=tuple(_findings(case.findings)),
        signature=printable(case.failure_signature.text) if case.failure_signature is not None else "",
        curves=plain if measured is None else measured.curves,
        allowed=() if measured is None else measured.allowed_loss,
        numbers=() if measured is None else tuple((name, value) for name, value in distances(measured) if value),
        casts=() if measured is None else tuple(_casts(measured.casts)),
        wire=() if measured is None else tuple(_wire(measured.wire, measured.expected_wire)),
        saved=(None, None) if measured is None else (measured.saved_bytes, measured.expected_saved_bytes),
        fused={} if measured is None else measured.fused,
        checks=case.checks,
        unjudged=tuple(
            NotJudged(check=skipped.check, reason=printable(skipped.reason), unverified=skipped.unverified)
            for skipped in case.not_judged
        ),
        stacks=tuple(_stacks(case.failures)),
        fixed=() if case.with_fix is None else tuple(_findings(case.with_fix.findings)),
        history=history,
    )


def _facts(each: Known) -> Iterable[tuple[str, str]]:
    """Short facts about a case; defaults are left out."""
    case = each.case
    yield "ranks", str(case.world_size)
    yield "seconds", f"{case.seconds:.1f} wall, {case.cpu_s:.1f} CPU"
    if case.expectation:
        yield "must show", printable(case.expectation)
    if case.golden:
        yield "golden", case.golden
    if case.derived:
        yield "derived tolerances", ", ".join(case.derived)
    if retried(case):
        yield "attempts", printable(retried(case))
    if case.with_fix is not None:
        yield "with the candidate fix", f"{case.with_fix.verdict.value} ({printable(', '.join(case.with_fix.fixes))})"


def _findings(findings: Sequence[Finding]) -> Iterable[FindingText]:
    split = first_effect(findings)
    for number, each in enumerate(findings):
        yield FindingText(
            rule=printable(each.rule),
            message=printable(each.headline),
            place=printable(each.place),
            expected=printable(each.expected or ""),
            found=printable(each.found or ""),
            fix=printable(each.fix or ""),
            effect=split is not None and number >= split,
        )


def _wire(found: Mapping[str, Sent], expected: Mapping[str, Sent]) -> Iterable[tuple[str, Sent | None, Sent | None]]:
    """Every kind of collective; those that are not as the formula says first."""
    names = sorted(
        {*found, *expected}, key=lambda name: (name not in expected or found.get(name) == expected[name], name)
    )
    return ((name, found.get(name), expected.get(name)) for name in names)


def _casts(casts: Sequence[CastRange]) -> Iterable[Casts]:
    """The casts by operand, those with the most elements saturated or flushed first."""
    steps = sorted({each.step for each in casts})
    rows: dict[tuple[str, str], dict[int, CastRange]] = {}
    for each in casts:
        rows.setdefault((each.fqn, each.role), {})[each.step] = each
    for (fqn, role), found in sorted(rows.items(), key=lambda item: -max(each.lost for each in item[1].values())):
        in_order = [found.get(step) for step in steps]
        low = _rounded(None if each is None else each.scale_min for each in in_order)
        high = _rounded(None if each is None else each.scale_max for each in in_order)
        yield Casts(
            fqn=printable(fqn),
            role=role,
            amax=_rounded(None if each is None else each.amax for each in in_order),
            low=low,
            high=() if high == low else high,
            saturated=_unless_zero(None if each is None else each.saturated for each in in_order),
            flushed=_unless_zero(None if each is None else each.flushed for each in in_order),
        )


def _rounded(values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(None if value is None else float(f"{value:.{_DIGITS}g}") for value in values)


def _unless_zero(values: Iterable[float | None]) -> tuple[float | None, ...]:
    found = _rounded(values)
    return found if any(found) else ()


def _stacks(failures: Sequence[RankFailure]) -> Iterable[Stack]:
    """How ranks failed, each way once: causes before consequences."""
    ways: dict[tuple[str, str, str, str, bool], list[int]] = {}
    for each in sorted(failures, key=lambda failure: (failure.consequence, failure.rank)):
        way = (each.kind, each.phase, printable(each.message), printable(each.traceback), each.consequence)
        ways.setdefault(way, []).append(each.rank)
    for (kind, phase, message, traceback, consequence), ranks in ways.items():
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        when = f" in {phase}" if phase else ""
        because = " after another rank failed" if consequence else ""
        yield Stack(head=f"{who} {kind}{when}{because}: {message}", text=traceback)
