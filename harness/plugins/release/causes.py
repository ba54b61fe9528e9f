"""What moved between two sides, by its origin: a named change of torch, our own side, or nothing on record.

A group is all reasons with one cause. Kinds, verdicts, formulas and records decide, never text. Whether a case depends
on a named change follows from its formulas: they say something else with it than without it.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from harness.expect.expectations import CASTS, SAVED_MEMORY, TRAFFIC, Expectations
from harness.hints import repro_with
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import PACKAGES, KnownFault, matching
from harness.matrix.selector import parse_selector
from harness.matrix.upstream import CHANGES, Changes, UpstreamChange, changes_in
from harness.plugins.release.sides import Kind, Pair, Reason, Sides, Topic
from harness.result import CaseResult, Environment
from harness.running.environments import is_version
from harness.verdict import Verdict


class Origin(enum.Enum):
    """Whose change it is. The value is the name in reports."""

    TORCH = "torch"  # a named change of torch or torchao, or a recorded fault of one side's versions
    OURS = "ours"  # references, references, records and the harness: what the candidate was not checked by
    UNEXPLAINED = "unexplained"  # nothing that is recorded accounts for it


Side = Literal["", "baseline", "candidate"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons with one cause. `example`: the cheapest case that ends differently, if any; what follows is of it."""

    origin: Origin
    name: str  # of the upstream change or of the recorded fault; else of the check or the kind of reason
    what: str  # the cause in a sentence
    link: str = ""
    side: Side = ""  # which has the change or the fault of torch
    moved: Mapping[Topic, tuple[str, ...]]  # the ids of the cases by what moved in them
    example: str
    verdicts: tuple[str, str]  # of the example: in the baseline and in the candidate
    first: str  # the first finding, or the first number that moved
    command: str  # reproduces it

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case for cases in self.moved.values() for case in cases))


class _Cause(NamedTuple):
    origin: Origin
    name: str
    what: str
    link: str = ""
    side: Side = ""


def grouped(
    sides: Sides, reasons: Sequence[Reason], faults: Sequence[KnownFault], *, words: Sequence[str] = ()
) -> tuple[Group, ...]:
    """Return every reason of a case in a group, by origin, the largest group first.

    `faults`: those on record, of all versions. `words` are options by which a version is found.
    """
    attribution = _Attribution(sides, faults)
    by_cause: dict[_Cause, list[Reason]] = {}
    # The reasons of a case stand together, whatever their weight.
    order = {case: place for place, case in enumerate(dict.fromkeys(reason.case for reason in reasons))}
    for reason in sorted(reasons, key=lambda reason: order[reason.case]):
        if reason.case is not None and reason.kind not in (Kind.STILL_FAILING, Kind.REQUIRED):
            by_cause.setdefault(attribution.cause(reason, reason.case), []).append(reason)
    groups = [_group(cause, cause_reasons, sides, faults, words) for cause, cause_reasons in by_cause.items()]
    return tuple(sorted(groups, key=lambda group: (list(Origin).index(group.origin), -len(group.cases), group.name)))


_OURS = (
    Kind.UNEXPECTED_PASS, Kind.INTERRUPTED, Kind.LOST_COVERAGE, Kind.LOST_CHECK, Kind.GOLDEN, Kind.TOLERANCE,
    Kind.REFERENCES,
)  # fmt: skip
_OF_FAULTS = (Kind.KNOWN_FAULT, Kind.FAULT_GONE, Kind.EXPLAINED)
_OF_FORMULAS = {Topic.TRAFFIC: "traffic", Topic.MEMORY: "saved memory", Topic.CASTS: "casts"}
_NUMBERS = (Kind.FP8_MOVED, Kind.BF16_MOVED, Kind.MOVED)


class _Attribution:
    """Finds the causes of what moved, from what is named and different between the packages of two sides."""

    def __init__(self, sides: Sides, faults: Sequence[KnownFault]) -> None:
        before, after = map(_versions, sides.environments)
        self._sides, self._packages = sides, (before, after)
        self._before, self._after = map(_changes_of, sides.environments)
        self._differing = sorted(self._before ^ self._after, key=lambda change: change.name)
        self._faults = faults if before and after else ()

    def cause(self, reason: Reason, case_id: str) -> _Cause:
        after = self._sides.after.get(case_id)
        if fault := self._fault(reason, case_id):
            side: Side = "baseline" if fault.affects(self._packages[1]) is False else "candidate"
            return _Cause(Origin.TORCH, fault.name, fault.reason, fault.link, side)
        if change := self._change(reason, case_id):
            side = "candidate" if change in self._after else "baseline"
            return _Cause(Origin.TORCH, change.name, change.what, change.link, side)
        if reason.kind in _OURS or (after is not None and _is_ours(reason, after)):
            what = reason.what if reason.kind is Kind.LOST_CHECK else reason.kind.phrase
            return _Cause(Origin.OURS, reason.kind.value, what)
        if Topic.VERDICT in reason.topics and after is not None and after.failure_signature is not None:
            return _Cause(Origin.UNEXPLAINED, after.failure_signature.kind, after.failure_signature.text)
        return _Cause(Origin.UNEXPLAINED, reason.kind.value, reason.kind.phrase)

    def _fault(self, reason: Reason, case_id: str) -> KnownFault | None:
        """Return the recorded fault of one side alone that the reason names, or that its numbers follow.

        Of two pre-releases that may have it, the one that shows it has it.
        """
        if not self._faults or reason.kind not in (*_OF_FAULTS, *_NUMBERS):
            return None
        for fault in matching(self._faults, parse_case_id(case_id)):
            before, after = map(fault.affects, self._packages)
            named = fault.name in reason.faults
            if (before is not after and (named or not reason.faults)) or (before is after is None and named):
                return fault
        return None

    def _change(self, reason: Reason, case_id: str) -> UpstreamChange | None:
        """Return the named change that accounts for all that moved: by formulas, or because ranks round differently."""
        if not self._differing:
            return None
        case = parse_case_id(case_id)
        formulas = frozenset(_OF_FORMULAS.get(topic, "") for topic in reason.topics)
        explaining = (change for change in self._differing if formulas <= self._moved(case, change))
        rounds = (of for of in self._differing if of.rounds and parse_selector(of.rounds).matches(case))
        return next(explaining, None) or (next(rounds, None) if reason.kind in _NUMBERS else None)

    def _moved(self, case: Case, change: UpstreamChange) -> frozenset[str]:
        """Return the formulas that this one change makes different, beside the changes that both sides have."""
        both = self._before & self._after
        without, with_it = Expectations(case, changes=both), Expectations(case, changes=both | {change})
        formulas = frozenset(
            name for name in change.formulas if list(_claims(name, without)) != list(_claims(name, with_it))
        )
        return formulas | frozenset(change.within_limits if formulas else ())


def _versions(environment: Environment) -> dict[str, str]:
    return {name: version for name, version in environment.packages.items() if is_version(version)}


def _changes_of(environment: Environment) -> Changes:
    """Return what the run found in the packages themselves; what their versions say where it does not tell."""
    if environment.upstream is None:
        return changes_in(_versions(environment))
    return frozenset(change for change in CHANGES if change.name in environment.upstream)


def _claims(formula: str, expect: Expectations) -> Iterator[object]:
    """Yield the values of a formula for the case on every rank; nothing where it does not apply."""
    case = expect.case
    if not expect.has_formulas or expect.refusal is not None:
        return
    if formula == CASTS:
        yield expect.compiled_casts
    for rank in range(case.world_size):
        for step in (1, 2):  # every later step is like the second
            if formula == TRAFFIC:
                yield expect.transfers(step=step, rank=rank)
            elif formula == SAVED_MEMORY and expect.saves_exactly:
                yield expect.saved_bytes(step=step, rank=rank)
            elif formula == SAVED_MEMORY:
                yield expect.saved_limits(step=step, rank=rank)


def _is_ours(reason: Reason, after: CaseResult) -> bool:
    """True for a failure that proves nothing about torch: nothing was checked, or it was raised outside of torch."""
    if reason.kind not in (Kind.NEW_FAILURE, Kind.OTHER_FAILURE):
        return False
    causes = {failure.kind for failure in after.failures if not failure.consequence}
    if causes:
        in_torch = after.failure_signature is not None and after.failure_signature.where
        return causes == {"raised"} and not in_torch
    return not any(finding.judged for finding in after.findings)


def _group(
    cause: _Cause, reasons: Sequence[Reason], sides: Sides, faults: Sequence[KnownFault], words: Sequence[str]
) -> Group:
    moved: dict[Topic, dict[str, None]] = {}
    for reason in reasons:
        for topic in reason.topics:
            moved.setdefault(topic, {})[reason.case or ""] = None
    example = min(reasons, key=lambda reason: _order_of_examples(reason, sides))
    first, command = example.what, example.command
    if Topic.VERDICT in example.topics and (pair := sides.pairs.get(example.case or "")):
        # The first finding of a recorded fault, on the side that shows it.
        recorded = [fault for fault in faults if fault.name == cause.name]
        findings = (*pair.candidate.findings, *pair.baseline.findings)
        shown = (finding.first_line for finding in findings if any(fault.explains(finding) for fault in recorded))
        first, command = next(shown, first), _with_bad_version(pair, sides, words) or command
    return Group(
        **cause._asdict(),
        moved={topic: tuple(moved[topic]) for topic in Topic if topic in moved},
        example=example.case or "",
        verdicts=sides.verdicts(example.case or ""),
        first=first,
        command=command,
    )


def _order_of_examples(reason: Reason, sides: Sides) -> tuple[bool, bool, float]:
    """Return a sort key: cases whose verdict moved come first, those with another verdict for another cause last."""
    before, after = sides.verdicts(reason.case or "")
    is_moved = before != after
    return not (is_moved and Topic.VERDICT in reason.topics), is_moved, sides.cost(reason.case or "")


def _with_bad_version(pair: Pair, sides: Sides, words: Sequence[str]) -> str:
    """Reproduce a failure with the version that has it; empty if not exactly one package differs."""
    before, after = (environment.packages for environment in sides.environments)
    differ = [name for name in PACKAGES if name in before and name in after and before[name] != after[name]]
    verdicts = pair.baseline.verdict, pair.candidate.verdict
    failed, fails = (verdict is not Verdict.PASSED for verdict in verdicts)
    if len(differ) != 1 or failed == fails or Verdict.INFRA in verdicts:
        return ""
    old, new = (packages[differ[0]].partition("+")[0] for packages in (before, after))
    if old == new:  # two builds of one version have the same name
        return ""
    return repro_with(pair.id, differ[0], new if fails else old, *words)
