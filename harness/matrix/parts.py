"""Parts of a selection: one of several shards, or the best that fits into a given time.

Both depend on the cases and their stored costs alone, so every machine computes the same.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.choice import carried, contained
from harness.matrix.planted import PlantedFault
from harness.matrix.pricing import Price, Pricing
from harness.matrix.tier import Selection


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    @property
    def text(self) -> str:
        """As it is given: "2/4"."""
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """The shard of "2/4". Raises `HarnessError` for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text, flags=re.ASCII)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise HarnessError("no shard.", where=f"--shard {text}", fix="write I/N with 1 <= I <= N, such as 1/4.")
    return Shard(index=index, count=count)


def cases_of_shard(cases: Sequence[Case], shard: Shard, price: Pricing) -> tuple[Case, ...]:
    """The cases of one shard, in the order of `cases`, which has each once. Empty only where shards outnumber cases."""
    part = shards(cases, shard.count, price)[shard.index - 1]
    return tuple(case for case in cases if case_id(case) in part)


def shards(cases: Iterable[Case], count: int, price: Pricing) -> tuple[frozenset[str], ...]:
    """The ids of `count` shards of nearly the same CPU seconds.

    The dearest case comes first, each to the shard that then has least to do. A witness is paid for once in a shard.
    """
    parts = [_Part() for _ in range(count)]
    prices = sorted(
        ((price(case), case_id(case)) for case in cases), key=lambda priced: (-priced[0].extra_s(()), priced[1])
    )
    for case_price, name in prices:
        least = min(parts, key=lambda part: (part.cost_with(case_price), len(part.ids)))
        least.add(name, case_price)
    return tuple(frozenset(part.ids) for part in parts)


class _Part:
    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.cost_s = 0.0
        self._witnesses: set[str] = set()

    def cost_with(self, price: Price) -> float:
        """CPU seconds with one more case."""
        return self.cost_s + price.extra_s(self._witnesses)

    def add(self, name: str, price: Price) -> None:
        self.cost_s = self.cost_with(price)
        self._witnesses |= price.shared_s.keys()
        self.ids.add(name)


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
    faults: Iterable[PlantedFault],
    budget_cpu_s: float,
) -> Budgeted:
    """The cases that together cover most combinations of values and planted faults in so many CPU seconds.

    Greedy: the next case is the one that adds most per second to those before it, its witnesses included.
    """
    prices = {case_id(case): pricing(case) for case in cases}
    everything = _Part()
    for name, price in prices.items():
        everything.add(name, price)
    if everything.cost_s <= budget_cpu_s:
        return Budgeted(cases=tuple(cases), left_out=(), cost_cpu_s=everything.cost_s)
    worth = _worth(cases, list(selections), list(faults))
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


def _worth(
    cases: Sequence[Case], selections: Sequence[Selection], faults: Sequence[PlantedFault]
) -> dict[str, set[object]]:
    """What every case covers, by its id: combinations of the blocks of the selections, and planted faults."""
    known = [fault for selection in selections for fault in selection.known]
    worth: dict[str, set[object]] = {
        case_id(case): {fault.name for fault in carried(case, faults, known)} for case in cases
    }
    for selection in selections:
        file = selection.file
        if file.strength == "full":
            continue
        for case in cases:
            goals = contained(case, selection.spaces, file.strength)
            worth[case_id(case)] |= {(file.name, *goal) for goal in goals}
    return worth
