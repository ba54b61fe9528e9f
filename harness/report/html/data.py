"""What the script of the page shows: an index of all cases, and the details of each, which it reads when it is opened.

Texts are those of the other reports; axes have their values in order; the casts of a case are one row an operand.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from harness.checks.catalogue import CHECKS, first_effect
from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_values, choices, own_axes, shown_value
from harness.matrix.case import Case
from harness.matrix.caseid import mesh_words, parse_case_id
from harness.report.case import communicated, distances, failure_words, headline, outcome, retried
from harness.report.sections import Table
from harness.result import CaseResult, CastRange, Curve, Measured, RunResult
from harness.trace import RankFailure
from harness.verdict import Finding, Verdict

_LAYOUT = "layout"  # the mesh in words: what people compare first, and no axis of its own
_DIGITS = 3  # significant ones of what casts have
# The worst first: of a cell of the heat map the worst verdict counts.
_WORST_FIRST = (
    Verdict.CRASH, Verdict.HANG, Verdict.INVARIANT, Verdict.NUMERIC, Verdict.CHANGED, Verdict.UNEXPECTED_PASS,
    Verdict.INFRA, Verdict.NOT_RUN, Verdict.KNOWN, Verdict.PASSED,
)  # fmt: skip


Data = dict[str, object]  # what is empty is left out of it


class ParsedCase(NamedTuple):
    case: CaseResult
    read: Case | None  # None for an id that this version cannot read
    axes: Mapping[str, object]  # empty for such an id


def index_and_details(run: RunResult, history: Mapping[str, Table]) -> tuple[Data, tuple[Data, ...]]:
    """Return the index of a run and the details of its cases, in the same order: the worst verdicts first."""
    parsed = sorted(map(_parsed, run.results), key=lambda parsed_case: _WORST_FIRST.index(parsed_case.case.verdict))
    axes = dict(_axes([parsed_case.axes for parsed_case in parsed if parsed_case.axes]))
    index: Data = {
        "verdicts": [
            {"name": verdict.value, "phrase": verdict.phrase, "good": verdict.good} for verdict in _WORST_FIRST
        ],
        "axes": [{"name": name, "values": values} for name, values in axes.items()],
        "meanings": {_LAYOUT: "ranks of every mesh axis", **{name: axis.meaning for name, axis in DECLARED.items()}},
        "cases": [_row(parsed_case, axes) for parsed_case in parsed],
        "checks": {check.name: (check.question, check.sight) for check in CHECKS},
    }
    return index, tuple(_detail(parsed_case, history.get(parsed_case.case.case_id)) for parsed_case in parsed)


def _parsed(case: CaseResult) -> ParsedCase:
    try:
        read = parse_case_id(case.case_id)
    except HarnessError:
        return ParsedCase(case, None, {})
    return ParsedCase(case, read, {_LAYOUT: mesh_words(read.layout), **axis_values(read)})


def _axes(cases: Sequence[Mapping[str, object]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the axes on which the cases differ, with the values that they have, in order."""
    for name in (_LAYOUT, *AXES):
        values = list(dict.fromkeys(case[name] for case in cases))
        if len(values) > 1:
            yield name, list(map(shown_value, sorted(values, key=lambda value: _order(name, value))))


def _order(name: str, value: object) -> tuple[bool, float, str]:
    """Named choices as they are listed, numbers by size, words by the alphabet."""
    listed = ("single",) if name == _LAYOUT else choices(name)
    number = value if isinstance(value, int | float) else 0
    return value not in listed, listed.index(value) if value in listed else number, shown_value(value)


def _filled(**values: object) -> Data:
    return {name: value for name, value in values.items() if value not in (None, "", (), [], {})}


def _row(parsed: ParsedCase, axes: Mapping[str, Sequence[str]]) -> Data:
    """Return a case in the list. `at`: the number of its value on every axis."""
    case = parsed.case
    return _filled(
        id=case.case_id,
        verdict=case.verdict.value,
        ranks=case.world_size,
        seconds=round(case.seconds, 1),
        note=headline(case),
        at=tuple(values.index(shown_value(parsed.axes[name])) for name, values in axes.items()) if parsed.axes else (),
        found=tuple(dict.fromkeys(finding.check for finding in case.findings)),
        unjudged=tuple(dict.fromkeys(skipped.check for skipped in case.not_judged)),
    )


def _detail(parsed: ParsedCase, history: Table | None) -> Data:
    """Everything else about a case. `axes`: those that are not at their default; `fixed`: with the candidate fix."""
    case = parsed.case
    own = own_axes(parsed.read) if parsed.read is not None else {}
    return _filled(
        outcome=outcome(case),
        command=case.command,
        axes=tuple((name, shown_value(value)) for name, value in own.items()),
        facts=tuple((name, value) for name, value in _facts(case) if value),
        lines=case.three_lines.texts,
        findings=_findings(case.findings),
        curves={"case": Curve(losses=case.losses, grad_norms=case.grad_norms)} if case.losses else {},
        checks=case.checks,
        unjudged=case.not_judged,
        stacks=tuple(_stacks(case.failures)),
        fixed=() if case.with_fix is None else _findings(case.with_fix.findings),
        history=history,
    ) | ({} if case.measured is None else _measured(case.measured))


def _measured(measured: Measured) -> Data:
    return _filled(
        numbers=tuple((name, value) for name, value in distances(measured) if value),
        allowed=measured.allowed_loss,
        casts=tuple(_casts(measured.casts)),
        errors=_filled(gradients=measured.gradient_errors, replay=measured.replay_errors),
        timeline=measured.timeline,
        wire=communicated(measured),
        fused=measured.fused,
    ) | {"curves": measured.curves}


def _facts(case: CaseResult) -> Iterator[tuple[str, str]]:
    """Short facts; those that are as usual are empty."""
    yield "ranks", str(case.world_size)
    yield "seconds", f"{case.seconds:.1f} wall, {case.cpu_s:.1f} CPU"
    yield "must show", case.expectation or ""
    yield "golden", case.golden
    yield "derived tolerances", ", ".join(case.derived)
    yield "attempts", retried(case)
    if case.with_fix is not None:
        yield "with the candidate fix", f"{case.with_fix.verdict.value} ({', '.join(case.with_fix.fixes)})"


def _findings(findings: Sequence[Finding]) -> tuple[Data, ...]:
    """Return the findings. `effect`: probably an effect of earlier ones."""
    split = first_effect(findings)
    return tuple(
        {"rule": finding.rule, "message": finding.message, "effect": split is not None and number >= split}
        | _filled(place=finding.place, expected=finding.expected, found=finding.found, fix=finding.fix)
        for number, finding in enumerate(findings)
    )


def _casts(casts: Sequence[CastRange]) -> Iterator[Data]:
    """The casts by operand, one number a step, null where it was not cast; those that lose the most elements first.

    `low` and `high`: the smallest and largest scale; `high` is left out where they are the same.
    """
    steps = sorted({cast.step for cast in casts})
    rows: dict[tuple[str, str], dict[int, CastRange]] = {}
    for cast in casts:
        rows.setdefault((cast.fqn, cast.role), {})[cast.step] = cast
    for (fqn, role), by_step in sorted(rows.items(), key=lambda item: -max(cast.lost for cast in item[1].values())):
        values = [by_step.get(step) for step in steps]
        numbers = {
            name: tuple(None if cast is None else float(f"{getattr(cast, name):.{_DIGITS}g}") for cast in values)
            for name in ("amax", "scale_min", "scale_max", "saturated", "flushed")
        }
        low, high = numbers["scale_min"], numbers["scale_max"]
        lost = {name: numbers[name] for name in ("saturated", "flushed") if any(numbers[name])}
        yield _filled(fqn=fqn, role=role, amax=numbers["amax"], low=low, high=() if high == low else high, **lost)


def _stacks(failures: Sequence[RankFailure]) -> Iterator[Data]:
    """Yield how ranks failed, each way once: causes before consequences."""
    ways: dict[RankFailure, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: (failure.consequence, failure.rank)):
        ways.setdefault(replace(failure, rank=0), []).append(failure.rank)
    for failure, ranks in ways.items():
        yield {"head": failure_words(failure, ranks), "text": failure.traceback}
