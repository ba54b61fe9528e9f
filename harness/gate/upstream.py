"""What torch changed between two sides: named changes that a case depends on, and recorded faults of one side alone.

Whether a case depends on a named change follows from its formulas: they say something else with it than without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from harness.expect.expectations import CASTS, SAVED_MEMORY, TRAFFIC, Expectations
from harness.expect.upstream import UpstreamChange, changes_in
from harness.gate.sides import Sides
from harness.matrix.case import Case
from harness.matrix.known import KnownFault, matching
from harness.matrix.selector import parse_selector
from harness.running.versions import is_version

Side = Literal["baseline", "candidate"]

_STEPS = (1, 2)  # every later step is like the second


class Upstream:
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
        """The named change because of which the ranks of this case round otherwise."""
        return next(
            (each for each in self._differing if each.rounds and parse_selector(each.rounds).matches(case)), None
        )

    def side_of(self, named: UpstreamChange | KnownFault) -> Side:
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
        for step in _STEPS:
            if formula == TRAFFIC:
                yield expect.transfers(step=step, rank=rank)
            elif formula == SAVED_MEMORY and expect.saves_exactly:
                yield expect.saved_bytes(step=step, rank=rank)
            elif formula == SAVED_MEMORY:
                yield expect.saved_limits(step=step, rank=rank)
