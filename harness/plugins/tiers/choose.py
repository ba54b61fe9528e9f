"""Choosing the cases of a tier: must-run cases, a cheap cover, host cases of injected faults, and why each is there.

The cover is a cheap set of cases that has every pair (or triple) of axis values that can train. A greedy covering array
takes no account of what a case costs: a world of 8 compiled ranks costs fifty times as much as one eager rank. Here a
covering array is improved, again and again, by taking a few rows out and covering what they alone covered with cheaper
ones. It takes a minute, and listing a tier must not: `dev tier` writes the choice to `cases/chosen/TIER.toml`, where a
change shows in review.
"""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile
from harness.matrix.caseid import case_id
from harness.matrix.choice import ChosenCase, Goal, PlantedFault, Price, Pricing, carried, contained
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.matrix.space import Combination, Row, Space, combinations_in, is_hit, possible_combinations
from harness.matrix.tier import second_best_rows, tier_spaces


class _Cell(NamedTuple):
    space: int
    row: Row


class CheapCover:
    """Finds a cheap covering set of cells of several spaces. The same for the same arguments, always."""

    def __init__(self, spaces: Sequence[Space], strength: int, given: Iterable[Case], pricing: Pricing) -> None:
        """`given` are the cases that are selected anyway: what they cover and need costs nothing more."""
        self._spaces = spaces
        self._strength = strength
        self._pricing = pricing
        self._random = random.Random(0)
        self._avoid = [[*space.tables] for space in spaces]
        self._goals = {
            (index, combination)
            for index, space in enumerate(spaces)
            for combination in possible_combinations(space, strength, self._avoid[index])
        }
        self._prices: dict[_Cell, Price] = {}
        self._covers: dict[_Cell, frozenset[Goal]] = {}
        self._given = Counter(goal for case in given for goal in self._goals_of(case))
        self._given_needs = {name for case in given for name in pricing(case).shared_s}
        self._value_costs = [self._costs_of_values(index) for index in range(len(spaces))]

    def choose(self, rounds: int) -> list[Case]:
        """Return the cases, besides the given ones, after so many rounds of improvement."""
        best = self._repaired(_Chosen(self))
        for _ in range(rounds):
            trial = best.copy()
            for cell in self._expensive_cells(trial):
                trial.remove(cell)
            self._repaired(trial)
            if trial.cost_s < best.cost_s - 1e-9:
                best = trial
        assert not best.missing, "the choice has a hole"
        return [self._spaces[cell.space].case(cell.row) for cell in sorted(best.cells)]

    def _expensive_cells(self, chosen: "_Chosen") -> list[_Cell]:
        """Return a few cells, at random, expensive ones more often."""
        cells = sorted(chosen.cells)
        weights = [chosen.marginal_s(cell, included=True) + 0.1 for cell in cells]
        return list(dict.fromkeys(self._random.choices(cells, weights, k=self._random.randint(2, 5))))

    def _repaired(self, chosen: "_Chosen") -> "_Chosen":
        """Cover the missing goals by the cells with most of them per second, then drop redundant cells."""
        while chosen.missing:
            starts = self._random.sample(sorted(chosen.missing), min(4, len(chosen.missing)))
            cells = [self._extended(goal, chosen.missing, self._random.choice((0.0, 0.1, 0.3, 1.0))) for goal in starts]
            gains = {cell: len(self.covers(cell) & chosen.missing) for cell in cells}
            chosen.add(max(gains, key=lambda cell: gains[cell] / chosen.marginal_s(cell, included=False)))
        for cell in sorted(chosen.cells, key=lambda cell: chosen.marginal_s(cell, included=True), reverse=True):
            if not chosen.unique(cell):
                chosen.remove(cell)
        for cell in sorted(chosen.cells, key=lambda cell: chosen.marginal_s(cell, included=True), reverse=True):
            self._cheapen(chosen, cell)
        return chosen

    def _cheapen(self, chosen: "_Chosen", cell: _Cell) -> None:
        """Change single values of a cell while it keeps what only it covers and becomes cheaper."""
        unique = chosen.unique(cell)
        chosen.remove(cell)
        if not unique:
            return
        fixed = {factor for index, combination in unique if index == cell.space for factor, _ in combination}
        sizes = self._spaces[cell.space].sizes
        best, cost_s, improved = cell, chosen.marginal_s(cell, included=False), True
        while improved:
            improved = False
            for factor, size in enumerate(sizes):
                for value in range(size) if factor not in fixed else ():
                    row = (*best.row[:factor], value, *best.row[factor + 1 :])
                    other = _Cell(cell.space, row)
                    if row == best.row or is_hit(row, self._avoid[cell.space]) or not unique <= self.covers(other):
                        continue
                    if (other_s := chosen.marginal_s(other, included=False)) < cost_s - 1e-9:
                        best, cost_s, improved = other, other_s, True
        chosen.add(best)

    def _extended(self, goal: Goal, missing: Collection[Goal], cost_weight: float) -> _Cell:
        """Return a cell with `goal`, extended greedily: each value maximizes new goals - `cost_weight` * its cost."""
        index, start = goal
        space, avoid, costs = self._spaces[index], self._avoid[index], self._value_costs[index]
        chosen = dict(start)
        open_values = [(f, v) for f, size in enumerate(space.sizes) if f not in chosen for v in range(size)]
        self._random.shuffle(open_values)
        gains = dict.fromkeys(open_values, 0)

        def count(partners: Iterable[Combination]) -> None:
            for partner in partners:
                for pair in gains:
                    gains[pair] += (index, tuple(sorted((*partner, pair)))) in missing

        count(itertools.combinations(start, self._strength - 1))
        while gains:
            best = max(gains, key=lambda pair: gains[pair] - cost_weight * costs[pair])
            if space.complete(chosen | dict([best]), avoid) is None:
                del gains[best]
                continue
            for pair in [pair for pair in gains if pair[0] == best[0]]:
                del gains[pair]
            count((*other, best) for other in itertools.combinations(chosen.items(), self._strength - 2))
            chosen |= dict([best])
        row = space.complete(chosen, avoid)
        assert row is not None, f"{goal} is not possible"
        return _Cell(index, row)

    def _costs_of_values(self, index: int) -> dict[tuple[int, int], float]:
        """Return the CPU seconds of some cell with each value: an indication, not a bound."""
        space = self._spaces[index]
        rows = {
            (factor, value): space.complete({factor: value}, self._avoid[index])
            for factor, size in enumerate(space.sizes)
            for value in range(size)
        }
        return {pair: self.price(_Cell(index, row)).own_s if row else 1e9 for pair, row in rows.items()}

    @property
    def goals(self) -> set[Goal]:
        """Return every combination that a training cell can contain."""
        return self._goals

    def price(self, cell: _Cell) -> Price:
        if cell not in self._prices:
            self._prices[cell] = self._pricing(self._spaces[cell.space].case(cell.row))
        return self._prices[cell]

    def covers(self, cell: _Cell) -> frozenset[Goal]:
        if cell not in self._covers:
            self._covers[cell] = self._goals_of(self._spaces[cell.space].case(cell.row))
        return self._covers[cell]

    def _goals_of(self, case: Case) -> frozenset[Goal]:
        goals: set[Goal] = set()
        for index, space in enumerate(self._spaces):
            row = space.row_of(case)
            if row is not None and not is_hit(row, self._avoid[index]):
                goals |= {(index, combination) for combination in combinations_in([row], self._strength)}
        return frozenset(goals & self._goals)

    def given(self) -> tuple[Counter[Goal], set[str]]:
        """Return how often the given cases cover each goal, and which references they need."""
        return self._given.copy(), set(self._given_needs)


class _Chosen:
    def __init__(self, cover: CheapCover) -> None:
        self._cover = cover
        self._covered, self._free = cover.given()
        self._needs: Counter[str] = Counter()
        self.cells: set[_Cell] = set()
        self.missing = {goal for goal in cover.goals if not self._covered[goal]}

    def copy(self) -> "_Chosen":
        other = _Chosen.__new__(_Chosen)
        other._cover, other._free = self._cover, self._free
        other._covered, other._needs = self._covered.copy(), self._needs.copy()
        other.cells, other.missing = set(self.cells), set(self.missing)
        return other

    @property
    def cost_s(self) -> float:
        """Return the CPU seconds of all cells with the references that they need."""
        prices = [self._cover.price(cell) for cell in self.cells]
        shared: dict[str, float] = {}
        for price in prices:
            shared |= price.shared_s
        return sum(price.own_s for price in prices) + sum(
            cost_s for name, cost_s in shared.items() if name not in self._free
        )

    def marginal_s(self, cell: _Cell, *, included: bool) -> float:
        """Return the CPU seconds that a cell adds to all others; `included`: it is one of the set."""
        price = self._cover.price(cell)
        others = 1 if included else 0
        alone = (
            cost_s for name, cost_s in price.shared_s.items() if self._needs[name] <= others and name not in self._free
        )
        return price.own_s + sum(alone)

    def unique(self, cell: _Cell) -> frozenset[Goal]:
        return frozenset(goal for goal in self._cover.covers(cell) if self._covered[goal] == 1)

    def add(self, cell: _Cell) -> None:
        if cell in self.cells:
            return
        self.cells.add(cell)
        self._covered.update(self._cover.covers(cell))
        self._needs.update(self._cover.price(cell).shared_s.keys())
        self.missing -= self._cover.covers(cell)

    def remove(self, cell: _Cell) -> None:
        self.cells.remove(cell)
        self._covered.subtract(self._cover.covers(cell))
        self._needs.subtract(self._cover.price(cell).shared_s.keys())
        self.missing |= {goal for goal in self._cover.covers(cell) if self._covered[goal] == 0}


def choose(
    file: CaseFile, pricing: Pricing, *, known: Sequence[KnownFault], faults: Iterable[PlantedFault], rounds: int
) -> tuple[ChosenCase, ...]:
    """Return a cheap choice of cases that covers a file and carries every injected fault.

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
    """Return the prices, twice where a recorded fault has a fix: such a case runs without and with it."""

    def priced(case: Case) -> Price:
        price = pricing(case)
        twice = any(fault.fix is not None for fault in matching(known, case))
        return msgspec.structs.replace(price, own_s=2 * price.own_s) if twice else price

    return priced


def _hosts(cases: Sequence[Case], faults: Iterable[PlantedFault], known: Sequence[KnownFault]) -> list[Case]:
    """Return the cheapest host cases in which every injected fault can show, of steps that the other cases reach."""
    longest = max(case.train.steps for case in cases)
    every = tuple(fault for fault in faults if fault.since_step <= longest)
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
        reasons[name] = "; ".join(words) or "carries injected faults"
    for case in others:
        refused = expected_refusal(case) is not None
        fate = "must be refused" if refused else "has a known issue"
        reasons.setdefault(case_id(case), f"{fate}: no other case can cover this")
    return reasons


def chosen_file(tier: str, chosen: Iterable[ChosenCase]) -> bytes:
    import tomli_w

    head = (
        f"# The cases of tier {tier}: written by `fp8-harness dev tier {tier}`, never by hand. Each has the CPU\n"
        "# seconds that it was expected to cost and what it is there for.\n\n"
    )
    tables = [
        {"id": case_id(choice.case), "cost_cpu_s": round(choice.cost_cpu_s, 1), "reason": choice.reason}
        for choice in chosen
    ]
    return (head + tomli_w.dumps({"case": tables})).encode()
