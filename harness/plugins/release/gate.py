"""The gate: GO or NO-GO for a candidate, with every reason in order of weight, or that nothing could be compared."""

import datetime
import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from harness.hints import run_cases
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import KnownFault, Quarantine, Required, quarantine_of
from harness.plugins.release import cases, numbers
from harness.plugins.release.causes import Group, grouped
from harness.plugins.release.sides import Allowance, Kind, Reason, Sides
from harness.result import RunResult
from harness.text import counted

_SHOWN_TWINS = 4


class GatePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of a gate: what it allows, requires and quarantines, and when it runs."""

    now: datetime.datetime  # UTC
    required: tuple[Required, ...] = ()
    quarantine: tuple[Quarantine, ...] = ()
    allowed: tuple[Allowance, ...] = ()
    strict: bool = False  # what failed before gates too
    gate_times: bool = False
    faults: tuple[KnownFault, ...] = ()  # on record, of all versions


class Side(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # that the user asked for it by
    started: str
    commit: str
    cases: int
    good: int
    checks: int  # checked, over all cases


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something else worth knowing, and a command that helps."""

    text: str
    command: str = ""


class Answer(enum.Enum):
    """The value is the word in reports."""

    GO = "GO"
    NO_GO = "NO-GO"
    NOT_COMPARED = "NOT COMPARED"


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `reasons` are in order: what gates first, each part by weight and size."""

    schema: int = 2
    answer: Answer
    not_compared: str = ""  # why; empty for another answer
    fix: str = ""  # what to do then
    baseline: Side
    candidate: Side
    compared: int  # cases that are good on both sides
    cases: int  # of either side
    left_out: tuple[str, ...] = ()  # how many of them are not compared, by reason: "3 only in the baseline"
    differences: tuple[str, ...]  # of the environments
    inexact: tuple[str, ...]  # why numbers are compared by tolerance only; empty: to the last bit
    reasons: tuple[Reason, ...]
    times: numbers.Times | None
    notes: tuple[Note, ...]
    groups: tuple[Group, ...] = ()  # what moved, by origin and cause

    @property
    def go(self) -> bool:
        return self.answer is Answer.GO

    @property
    def gating(self) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if reason.gates)

    @property
    def others(self) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if not reason.gates)


def gate(
    baseline: RunResult,
    candidate: RunResult,
    terms: GatePolicy,
    *,
    names: tuple[str, str] = ("baseline", "candidate"),
    goldens: cases.Goldens = lambda case_id: None,
    words: Sequence[str] = (),
) -> Gate:
    """Return the answer. `names` are those of the two sides, `goldens` finds the project's golden for a case.

    `words` are the options by which `bug repro --with` finds the environments of the two sides.
    """
    sides = Sides(baseline=baseline, candidate=candidate)
    found_times = numbers.times(sides)
    raw_reasons = [
        *cases.failures(sides, strict=terms.strict),
        *cases.required_cells(sides, terms.required, terms.now),
        *cases.unfinished(sides),
        *cases.lost_cases(sides),
        *cases.lost_checks(sides),
        *cases.changed_goldens(sides, goldens),
        *cases.changed_tolerances(sides),
        *cases.other_references(sides),
        *numbers.changed_counts(sides),
        *numbers.moved_numbers(sides),
        *numbers.changed_speedups(sides),
        *numbers.changed_times(found_times, gates=terms.gate_times or sides.environments[1].device not in ("", "cpu")),
    ]
    reasons = sorted((_judged(reason, terms) for reason in raw_reasons), key=lambda reason: reason.order)
    gates = any(reason.gates for reason in reasons)
    undecided = sides.undecidable or (None if gates else sides.nothing_good)
    why, fix = undecided or ("", "")
    return Gate(
        answer=Answer.NOT_COMPARED if undecided else Answer.NO_GO if gates else Answer.GO,
        not_compared=why,
        fix=fix,
        baseline=_side(names[0], baseline),
        candidate=_side(names[1], candidate),
        compared=len(sides.compared),
        cases=len({*sides.before, *sides.after}),
        left_out=sides.left_out,
        differences=sides.environments[0].differences(sides.environments[1]),
        inexact=sides.inexact_reasons,
        reasons=tuple(reasons),
        times=found_times,
        notes=tuple(_notes(sides, raw_reasons, terms)),
        groups=grouped(sides, reasons, terms.faults, words=words),
    )


def _judged(reason: Reason, terms: GatePolicy) -> Reason:
    """Return the reason, waived if its case is quarantined or its kind allowed; an expired quarantine is a detail."""
    if reason.kind.topic is not None:
        reason = msgspec.structs.replace(reason, topics=(reason.kind.topic,))
    if not reason.gates:
        return reason
    allowed = next((allowance for allowance in terms.allowed if allowance.kind is reason.kind), None)
    if allowed is not None:
        return msgspec.structs.replace(reason, gates=False, waiver=f"allowed: {allowed.reason}")
    if reason.case is None or reason.kind is Kind.REQUIRED or not terms.quarantine:  # nothing waives what is required
        return reason
    entry = quarantine_of(terms.quarantine, parse_case_id(reason.case))
    if entry is None:
        return reason
    if entry.holds(terms.now.date()):
        return msgspec.structs.replace(reason, gates=False, waiver=entry.text(terms.now.date()))
    return msgspec.structs.replace(reason, details=(entry.expired_text, *reason.details))


def _side(name: str, run: RunResult) -> Side:
    return Side(
        name=name,
        started=run.start.started,
        commit=run.start.environment.commit if run.start.environment is not None else "",
        cases=sum(case.ran for case in run.results),
        good=sum(case.good for case in run.results),
        checks=sum(len(case.checks) for case in run.results),
    )


def _notes(sides: Sides, raw_reasons: Iterable[Reason], terms: GatePolicy) -> Iterator[Note]:
    """Yield what else is worth knowing: what was not compared, and why."""
    if (sides.before, sides.baseline.start.started) == (sides.after, sides.candidate.start.started):
        yield Note(text="both sides are the same results")
    for run in (sides.baseline, sides.candidate):
        yield from (Note(text=f"{line}: run its cases again") for line in run.damaged)
    if sides.baseline.end.interrupted:
        yield Note(text="the baseline was interrupted: its missing cases are not compared")
    if new := [name for name in sides.after if name not in sides.before]:
        yield Note(text=f"new in the candidate: {counted(len(new), 'case')}, not compared with anything")
    sound = ((pair.baseline, pair.candidate) for pair in sides.compared)
    if unmeasured := sum(any(case.losses and case.measured is None for case in both) for both in sound):
        many = counted(unmeasured, "case")
        yield Note(text=f"no numbers were kept of {many}: only verdicts and checks are compared")
    if not sides.same_device:
        yield Note(text="matmuls, collectives, bytes and fused operators are not compared: the devices differ")
    moved = [reason.case for reason in raw_reasons if reason.case and reason.kind is Kind.MOVED]
    if missing := sorted({numbers.twins(parse_case_id(case))[0] for case in moved}):
        more = f" (the first {_SHOWN_TWINS} of {len(missing)})" if len(missing) > _SHOWN_TWINS else ""
        text = f"to tell FP8 from the environment, run BF16 counterparts on both sides{more}"
        yield Note(text=text, command=run_cases(*missing[:_SHOWN_TWINS]))
    kinds = {reason.kind for reason in raw_reasons if reason.gates}
    for allowed in terms.allowed:
        if allowed.kind not in kinds:
            yield Note(text=f"allowed for nothing: {allowed.kind.value}")
