"""The best part of a tier for a given time: the cases that cover most per second, until nothing more fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.cheap_cover import Pricing
from harness.matrix.choice import carried, contained
from harness.matrix.faults import Fault
from harness.matrix.tier import Selection, tier_spaces


class Budgeted(msgspec.Struct, frozen=True, kw_only=True):
    """What fits and what does not, both in the order of selection, and the CPU seconds that the first needs."""

    cases: tuple[Case, ...]
    left_out: tuple[Case, ...]
    cost_cpu_s: float


def within_budget(
    cases: Sequence[Case],
    selections: Iterable[Selection],
    pricing: Pricing,
    *,
    faults: Iterable[Fault],
    budget_cpu_s: float,
) -> Budgeted:
    """The cases that together cover most combinations of values and planted faults in so many CPU seconds.

    Greedy: the next case is the one that adds most per second to those before it, its witnesses included.
    """
    worth = _worth(cases, list(selections), list(faults))
    prices = {case_id(case): pricing(case) for case in cases}
    kept: dict[str, None] = {}
    covered: set[object] = set()
    needed: set[str] = set()
    spent_s = 0.0
    while True:
        fits = {
            name: cost_s
            for name in worth
            if name not in kept and spent_s + (cost_s := prices[name].extra_s(needed)) <= budget_cpu_s
        }
        if not fits:
            break
        best = max(fits, key=lambda name: (len(worth[name] - covered) + 0.01) / max(fits[name], 0.01))
        kept[best] = None
        covered |= worth[best]
        needed |= prices[best].shared_s.keys()
        spent_s += fits[best]
    return Budgeted(
        cases=tuple(case for case in cases if case_id(case) in kept),
        left_out=tuple(case for case in cases if case_id(case) not in kept),
        cost_cpu_s=spent_s,
    )


def _worth(cases: Sequence[Case], selections: Sequence[Selection], faults: Sequence[Fault]) -> dict[str, set[object]]:
    """What every case covers, by its id: combinations of the blocks of the selections, and planted faults."""
    known = [fault for selection in selections for fault in selection.known]
    worth: dict[str, set[object]] = {
        case_id(case): {fault.name for fault in carried(case, faults, known)} for case in cases
    }
    for selection in selections:
        file = selection.file
        if file.strength == "full":
            continue
        spaces = tier_spaces(file, selection.known)
        for case in cases:
            goals = contained(case, spaces, file.strength)
            worth[case_id(case)] |= {(file.name, *goal) for goal in goals}
    return worth
