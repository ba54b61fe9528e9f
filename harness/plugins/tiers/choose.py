"""Choosing the cases of a tier: must-run cases, a cheap cover, host cases of planted faults, and why each is there.

`cheap_cover.py` searches for a minute, and listing a tier must not. So `dev tier` writes the choice to
`cases/chosen/TIER.toml`, where a change shows in review.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile
from harness.matrix.caseid import case_id
from harness.matrix.choice import ChosenCase, PlantedFault, Price, Pricing, carried, contained
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.matrix.space import Space
from harness.matrix.tier import second_best_rows, tier_spaces
from harness.plugins.tiers.cheap_cover import CheapCover


def choose(
    file: CaseFile, pricing: Pricing, *, known: Sequence[KnownFault], faults: Iterable[PlantedFault], rounds: int
) -> tuple[ChosenCase, ...]:
    """A cheap choice of cases that covers a file and carries every planted fault; see `cheap_cover.py`.

    Must-run cases come first, then those that train, then those that are only there to be refused or to show a
    recorded fault. A file whose strength is "full" has nothing to choose.
    """
    if file.strength == "full":
        raise HarnessError(
            "every cell of this file is a case.", where=file.where, fix="choose tiers of strength 2 or 3."
        )
    spaces = tier_spaces(file, known)
    pricing = _with_second_runs(pricing, known)
    cover = CheapCover(spaces, file.strength, file.cases, pricing)
    trained = [*file.cases, *cover.choose(rounds)]
    trained += _hosts(trained, faults, known)
    others: list[Case] = []
    for space in spaces:
        seeds = [row for case in (*trained, *others) if (row := space.row_of(case)) is not None]
        others += [space.case(row) for row in second_best_rows(space, file.strength, seeds)]
    reasons = _reasons(file, file.strength, spaces, trained, others)
    unique = {case_id(case): case for case in (*trained, *others)}
    return tuple(
        ChosenCase(case=case, cost_cpu_s=pricing(case).own_s, reason=reasons[name]) for name, case in unique.items()
    )


def _with_second_runs(pricing: Pricing, known: Sequence[KnownFault]) -> Pricing:
    """The prices, twice where a recorded fault has a fix: such a case runs without and with it."""

    def priced(case: Case) -> Price:
        price = pricing(case)
        twice = any(fault.fix is not None for fault in matching(known, case))
        return msgspec.structs.replace(price, own_s=2 * price.own_s) if twice else price

    return priced


def _hosts(cases: Sequence[Case], faults: Iterable[PlantedFault], known: Sequence[KnownFault]) -> list[Case]:
    """The cheapest way to give every planted fault a case in which it can show: a host case of the catalogue."""
    every = tuple(faults)
    shown = {fault.name for case in cases for fault in carried(case, every, known)}
    added: list[Case] = []
    for fault in every:
        if fault.name not in shown:
            hosts = fault.hosts(at_most=1)
            shown |= {carried_fault.name for case in hosts for carried_fault in carried(case, every, known)}
            added += hosts
    return added


def _reasons(
    file: CaseFile, strength: int, spaces: Sequence[Space], trained: Sequence[Case], others: Sequence[Case]
) -> dict[str, str]:
    must = {case_id(case) for case in file.cases}
    by_name = {case_id(case): contained(case, spaces, strength) for case in trained}
    counts = Counter(goal for goals in by_name.values() for goal in goals)
    reasons = {}
    for name, goals in by_name.items():
        alone = sorted(goal for goal in goals if counts[goal] == 1)
        words = ["must run"] if name in must else []
        if alone:
            index, combination = alone[0]
            groups = spaces[index].block.groups
            first = " / ".join(groups[factor].label(value) for factor, value in combination)
            words.append(f"covers {len(alone)} combinations alone, such as {first}")
        reasons[name] = "; ".join(words) or "carries planted faults"
    for case in others:
        refused = expected_refusal(case) is not None
        fate = "must be refused" if refused else "runs into a recorded fault"
        reasons.setdefault(case_id(case), f"{fate}: no other case can contain what it contains")
    return reasons
