"""What moved between two sides, by its origin: a named change of torch, our own side, or nothing on record.

A group is all reasons with one cause. Kinds, verdicts, formulas and records decide, never text. Whether a case depends
on a named change follows from its formulas: they say something else with it than without it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from harness.expect.expectations import CASTS, SAVED_MEMORY, TRAFFIC, Expectations
from harness.expect.upstream import UpstreamChange, changes_in
from harness.gate.reason import Kind, Reason, Topic
from harness.gate.sides import Pair, Sides
from harness.hints import bisect_versions
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.known import PACKAGES, KnownFault, matching
from harness.matrix.selector import parse_selector
from harness.result import CaseResult
from harness.running.versions import is_version
from harness.verdict import Verdict


class Origin(enum.Enum):
    """Whose change it is. The value is the name in reports."""

    TORCH = "torch"  # a named change of torch or torchao, or a recorded fault of one side's versions
    OURS = "ours"  # references, witnesses, records and the harness: what the candidate was not judged by
    UNEXPLAINED = "unexplained"  # nothing that is recorded accounts for it

    @property
    def place(self) -> int:
        """Its place in reports."""
        return list(Origin).index(self)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons with one cause. `example` is a case that ends differently, if there is one, and the cheapest of these.

    What follows is about it.
    """

    origin: Origin
    name: str  # of the upstream change or of the recorded fault; else of the check or the kind of reason
    what: str  # the cause in a sentence
    link: str = ""
    side: Literal["", "baseline", "candidate"] = ""  # which has the change or the fault of torch
    moved: Mapping[Topic, tuple[str, ...]]  # the ids of the cases by what moved in them
    example: str
    verdicts: tuple[str, str]  # of the example: in the baseline and in the candidate
    first: str  # the first finding, or the first number that moved
    command: str  # reproduces or bisects it

    @property
    def cases(self) -> tuple[str, ...]:
        """The ids of all cases."""
        return tuple(dict.fromkeys(case for cases in self.moved.values() for case in cases))


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes a group."""

    origin: Origin
    name: str
    what: str
    link: str = ""
    side: Literal["", "baseline", "candidate"] = ""


def grouped(
    sides: Sides, reasons: Sequence[Reason], faults: Sequence[KnownFault], *, words: Sequence[str] = ()
) -> tuple[Group, ...]:
    """Every reason of a case in a group, by origin, the largest group first.

    `faults`: those on record, of all versions. `words` are options that a bisection needs besides its versions.
    """
    upstream = _Upstream(sides, faults)
    by_cause: dict[_Cause, list[Reason]] = {}
    by_case: dict[str, list[Reason]] = {}
    for reason in reasons:
        if reason.case is not None and reason.kind not in _NOT_MOVED:
            by_case.setdefault(reason.case, []).append(reason)
    for case, found in by_case.items():
        attribution = _Attribution(upstream, case, sides.after.get(case))
        for reason in found:
            by_cause.setdefault(attribution.cause(reason), []).append(reason)
    bisection = _bisection(sides, words)
    groups = [_group(cause, found, sides, faults, bisection) for cause, found in by_cause.items()]
    return tuple(sorted(groups, key=lambda each: (each.origin.place, -len(each.cases), each.name)))


_NOT_MOVED = (Kind.STILL_FAILING, Kind.REQUIRED)
_OURS = (
    Kind.UNEXPECTED_PASS, Kind.INTERRUPTED, Kind.LOST_COVERAGE, Kind.LOST_CHECK, Kind.GOLDEN, Kind.TOLERANCE,
    Kind.REFERENCES,
)  # fmt: skip
_OF_FAULTS = (Kind.KNOWN_FAULT, Kind.FAULT_GONE, Kind.EXPLAINED)
_OF_FORMULAS = {Topic.TRAFFIC: "traffic", Topic.MEMORY: "saved memory", Topic.CASTS: "casts"}
_NUMBERS = (Kind.FP8_MOVED, Kind.BF16_MOVED, Kind.MOVED)


class _Upstream:
    """What is named and different between the packages of two sides."""

    def __init__(self, sides: Sides, faults: Sequence[KnownFault]) -> None:
        before, after = (_versions(each.packages) for each in sides.environments)
        self._packages = after
        self._before, self._after = changes_in(before), changes_in(after)
        self._differing = sorted(self._before ^ self._after, key=lambda change: change.name)
        known = bool(before and after)
        self._faults = [fault for fault in faults if known and fault.affects(before) != fault.affects(after)]

    def explaining(self, case: Case, formulas: frozenset[str]) -> UpstreamChange | None:
        """The named change because of which all of these formulas, or their limits, let the case move."""
        return next((each for each in self._differing if formulas <= self._moved(case, each)), None)

    def rounding(self, case: Case) -> UpstreamChange | None:
        """The named change because of which the ranks of this case round differently."""
        return next(
            (each for each in self._differing if each.rounds and parse_selector(each.rounds).matches(case)), None
        )

    def side_of(self, named: UpstreamChange | KnownFault) -> Literal["baseline", "candidate"]:
        """Which of the two sides has it."""
        on_candidate = named in self._after if isinstance(named, UpstreamChange) else named.affects(self._packages)
        return "candidate" if on_candidate else "baseline"

    def faults(self, case: Case) -> tuple[KnownFault, ...]:
        """The recorded faults that the case has with one side only."""
        return matching(self._faults, case)

    def _moved(self, case: Case, change: UpstreamChange) -> frozenset[str]:
        """The formulas that this one change makes different, beside the changes that both sides have."""
        both = self._before & self._after
        without, with_it = Expectations(case, changes=both), Expectations(case, changes=both | {change})
        found = frozenset(
            name for name in change.formulas if list(_claims(name, without)) != list(_claims(name, with_it))
        )
        return found | frozenset(change.within_limits if found else ())


def _versions(packages: Mapping[str, str]) -> Mapping[str, str]:
    """Those that are versions: a document may be of any program."""
    return {name: version for name, version in packages.items() if is_version(version)}


def _claims(formula: str, expect: Expectations) -> Iterator[object]:
    """What a formula says of the case, of every rank; nothing where it does not apply."""
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


class _Attribution:
    """Finds the causes of what moved in one case."""

    def __init__(self, upstream: _Upstream, case_id: str, after: CaseResult | None) -> None:
        self._case, self._upstream, self._after = parse_case_id(case_id), upstream, after

    def cause(self, reason: Reason) -> _Cause:
        """The cause of one of its reasons."""
        named = self._fault(reason) or self._change(reason)
        if named is not None:
            what = named.reason if isinstance(named, KnownFault) else named.what
            side = self._upstream.side_of(named)
            return _Cause(origin=Origin.TORCH, name=named.name, what=what, link=named.link, side=side)
        if reason.kind in _OURS or self._is_ours(reason):
            return _Cause(origin=Origin.OURS, name=reason.kind.value, what=_of_kind(reason))
        if Topic.VERDICT in reason.topics and self._after is not None and self._after.failure_signature is not None:
            signature = self._after.failure_signature
            return _Cause(origin=Origin.UNEXPLAINED, name=signature.kind, what=signature.text)
        return _Cause(origin=Origin.UNEXPLAINED, name=reason.kind.value, what=reason.kind.phrase)

    def _change(self, reason: Reason) -> UpstreamChange | None:
        """The named change that accounts for all that moved: by formulas, or because ranks round differently."""
        formulas = frozenset(_OF_FORMULAS.get(topic, "") for topic in reason.topics)
        found = self._upstream.explaining(self._case, formulas)
        return self._upstream.rounding(self._case) if found is None and reason.kind in _NUMBERS else found

    def _fault(self, reason: Reason) -> KnownFault | None:
        """The recorded fault of one side alone that the reason names, or that its numbers follow."""
        if reason.kind not in (*_OF_FAULTS, *_NUMBERS):
            return None
        found = self._upstream.faults(self._case)
        return next((fault for fault in found if not reason.faults or fault.name in reason.faults), None)

    def _is_ours(self, reason: Reason) -> bool:
        """True for a failure that proves nothing about torch: nothing was judged, or it was raised outside of torch."""
        case = self._after
        if reason.kind not in (Kind.NEW_FAILURE, Kind.OTHER_FAILURE) or case is None:
            return False
        causes = [failure.kind for failure in case.failures if not failure.consequence]
        if causes:
            in_torch = case.failure_signature is not None and case.failure_signature.where
            return set(causes) == {"raised"} and not in_torch
        return not any(finding.judged for finding in case.findings)


def _of_kind(reason: Reason) -> str:
    return reason.what if reason.kind is Kind.LOST_CHECK else reason.kind.phrase


def _group(
    cause: _Cause, reasons: Sequence[Reason], sides: Sides, faults: Sequence[KnownFault], bisection: _Bisection | None
) -> Group:
    moved: dict[Topic, dict[str, None]] = {}
    for reason in reasons:
        for topic in reason.topics:
            moved.setdefault(topic, {})[reason.case or ""] = None
    example = min(reasons, key=lambda reason: _order_of_examples(reason, sides))
    pair = sides.pairs.get(example.case or "")
    return Group(
        origin=cause.origin,
        name=cause.name,
        what=cause.what,
        link=cause.link,
        side=cause.side,
        moved={topic: tuple(cases) for topic, cases in sorted(moved.items(), key=lambda each: each[0].place)},
        example=example.case or "",
        verdicts=sides.verdicts(example.case or ""),
        first=_first(example, pair, [fault for fault in faults if fault.name == cause.name]),
        command=(Topic.VERDICT in example.topics and bisection and pair and bisection.command(pair)) or example.command,
    )


def _order_of_examples(reason: Reason, sides: Sides) -> tuple[bool, bool, float]:
    """Cases whose verdict is what moved come first, those with another verdict for another cause last."""
    before, after = sides.verdicts(reason.case or "")
    is_moved = before != after
    return not (is_moved and Topic.VERDICT in reason.topics), is_moved, sides.cost(reason.case or "")


def _first(reason: Reason, pair: Pair | None, faults: Sequence[KnownFault]) -> str:
    """The first finding of a recorded fault, on the side that shows it; of anything else what the reason says."""
    findings = () if pair is None else (*pair.candidate.findings, *pair.baseline.findings)
    shown = (each.first_line for each in findings if any(fault.explains(each) for fault in faults))
    return next(shown, reason.what) if Topic.VERDICT in reason.topics else reason.what


class _Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """A search over the versions of the one package that differs between the two sides."""

    package: str
    before: str
    after: str
    words: Sequence[str]

    def command(self, pair: Pair) -> str:
        """Finds the version with which a case starts or stops to fail; empty where it does neither."""
        verdicts = pair.baseline.verdict, pair.candidate.verdict
        fails = tuple(verdict is not Verdict.PASSED for verdict in verdicts)
        if fails[0] == fails[1] or Verdict.INFRA in verdicts:
            return ""
        good, bad = (self.before, self.after) if fails[1] else (self.after, self.before)
        return bisect_versions(pair.id, self.package, good=good, bad=bad, words=self.words)


def _bisection(sides: Sides, words: Sequence[str]) -> _Bisection | None:
    """None where several packages differ, or none does: then no search over versions of one finds a change."""
    before, after = (each.packages for each in sides.environments)
    differ = [name for name in PACKAGES if name in before and name in after and before[name] != after[name]]
    if len(differ) != 1:
        return None
    old, new = (each[differ[0]].partition("+")[0] for each in (before, after))
    return _Bisection(package=differ[0], before=old, after=new, words=words)
