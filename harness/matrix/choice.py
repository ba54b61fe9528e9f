"""The choice of cases: for a tier, for one of several shards, and the best that fit into a given time.

`dev tier` writes those of a tier to `cases/chosen/TIER.toml`; `tier.py` refuses a choice that does not cover its tier.
Shards and budgets depend on the cases and their stored costs alone, so every machine computes the same.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness.errors import HarnessError
from harness.hints import choose_tier
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.matrix.space import Combination, Space, combinations_in, is_hit
from harness.matrix.tier import Selection, tables_of
from harness.matrix.tomlfile import TomlFile, read_toml_file
from harness.registry import answer, answers


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a case: its own, and by name those of its references, which other cases may share."""

    own_s: float
    shared_s: Mapping[str, float] = {}

    def extra_s(self, witnesses: Collection[str]) -> float:
        """Return the CPU seconds that the case adds when these references exist already."""
        return self.own_s + sum(cost_s for name, cost_s in self.shared_s.items() if name not in witnesses)


Pricing = Callable[[Case], Price]
Goal = tuple[int, Combination]  # a combination of values in one of the spaces


class PlantedFault(Protocol):
    """A deliberate bug, which some cases show from a step on."""

    @property
    def name(self) -> str: ...

    @property
    def since_step(self) -> int:
        """Return the first step in which anything can differ."""

    @property
    def unrefuses(self) -> bool:
        """Return True if a case that must be refused trains with it, so only such a case can show it."""

    def applies(self, case: Case) -> bool:
        """Return True if it can be injected into this case and has its effect there."""

    def hosts(self, *, at_most: int) -> tuple[Case, ...]:
        """Return the cases of its catalogue that it applies to, the first with the fewest ranks."""


FAULT_PREFIX = "fault:"  # of the injection that injects a fault


class Catalogue(Protocol):
    """What a plug-in answers about injected faults."""

    def all_faults(self) -> Mapping[str, Any]:
        """Return every fault by its name."""

    def fault_named(self, name: str) -> Any:
        """Return the fault of this name. Raises HarnessError with a suggestion if it does not exist."""


def planted_faults() -> tuple[PlantedFault, ...]:
    """Return every injected fault; none where no plug-in knows any."""
    return tuple(fault for catalogue in answers("injected faults") for fault in catalogue.all_faults().values())


def catalogue_of_faults(where: str) -> Catalogue:
    """Return the injected faults, which something at `where` needs. HarnessError if no plug-in knows any."""
    catalogue: Catalogue = answer("injected faults", where=where)
    return catalogue


def carries(case: Case, fault: PlantedFault, known: Sequence[KnownFault]) -> bool:
    """Return True if a fault injected into this case must show and cannot be taken for a known issue."""
    return bool(carried(case, (fault,), known))


def carried(case: Case, faults: Iterable[PlantedFault], known: Sequence[KnownFault]) -> tuple[PlantedFault, ...]:
    """Return those of the faults that the case `carries`."""
    if any(known_fault.masks_new_findings(case) for known_fault in matching(known, case)):
        return ()
    refused = expected_refusal(case) is not None
    return tuple(
        fault
        for fault in faults
        if case.train.steps >= fault.since_step and fault.unrefuses == refused and fault.applies(case)
    )


def contained(case: Case, spaces: Sequence[Space], strength: int) -> set[Goal]:
    """Return the combinations that a case covers: none when it is refused or runs into a recorded fault."""
    goals: set[Goal] = set()
    for index, space in enumerate(spaces):
        row = space.row_of(case)
        if row is not None and not is_hit(row, tables_of(space, "excluded", "refused", "known")):
            goals |= {
                (index, combination)
                for combination in combinations_in([row], strength)
                if space.block.combines(space.block.groups[factor].name for factor, _ in combination)
            }
    return goals


FOLDER = "chosen"


class ChosenCase(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    cost_cpu_s: float
    reason: str


def chosen_path(case_file: Path) -> Path:
    return case_file.parent / FOLDER / case_file.name


def read_chosen(path: Path) -> tuple[ChosenCase, ...]:
    """Return the cases of a choice, in its order. HarnessError with the line on anything that is not right."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("case",))
    return tuple(_chosen(toml, table, index) for index, table in enumerate(toml.tables("case")))


def _chosen(toml: TomlFile, table: object, index: int) -> ChosenCase:
    known = toml.check_keys("case", index, table=table, known=("id", "cost_cpu_s", "reason"))
    try:
        return ChosenCase(
            case=parse_case_id(str(known.get("id", ""))),
            cost_cpu_s=float(known.get("cost_cpu_s", 0.0)),
            reason=str(known.get("reason", "")),
        )
    except (HarnessError, ValueError) as error:
        what = error.what if isinstance(error, HarnessError) else str(error)
        raise toml.error("case", index, what=what, fix=f"run `{choose_tier(_tier_of(toml))}`.") from error


def _tier_of(toml: TomlFile) -> str:
    """Return the file of the tier that the cases were chosen for: `chosen_path` backwards."""
    path = Path(toml.where)
    return str(path.parents[1] / path.name)


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    @property
    def text(self) -> str:
        """As it is given: "2/4"."""
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Return the shard of "2/4". Raises `HarnessError` for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text, flags=re.ASCII)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise HarnessError("no shard.", where=f"--shard {text}", fix="write I/N with 1 <= I <= N, such as 1/4.")
    return Shard(index=index, count=count)


def cases_of_shard(cases: Sequence[Case], shard: Shard, price: Pricing) -> tuple[Case, ...]:
    """Return the cases of one shard, in the order of `cases`. Empty only where shards outnumber cases."""
    part = shards(cases, shard.count, price)[shard.index - 1]
    return tuple(case for case in cases if case_id(case) in part)


def shards(cases: Iterable[Case], count: int, price: Pricing) -> tuple[frozenset[str], ...]:
    """Return the ids of `count` shards of nearly the same CPU seconds.

    The dearest case comes first, each to the shard that then has least to do. A reference is paid for once in a shard.
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
        """Return the CPU seconds with one more case."""
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
    """Return the cases that together cover most combinations of values and injected faults in so many CPU seconds.

    Greedy: the next case is the one that adds most per second to those before it, its references included.
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
    """Return what every case covers, by its id: combinations of the blocks of the selections, and injected faults."""
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
