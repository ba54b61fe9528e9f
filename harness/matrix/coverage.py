"""The coverage account: what became of every pair or triple of axis values that a case file could combine.

And how many cells have given axis values, with the rules that apply to them (`explain axis=value`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.casefile import CaseFile
from harness.matrix.cover import Combination, combinations, combinations_in, possible_combinations
from harness.matrix.rules import Rule
from harness.matrix.space import Kind, Space, Table, is_hit, spaces_of
from harness.matrix.tier import Selection, tables_of

Fate = Literal["covered", "known", "refused", "skipped", "excluded"]
FATES: dict[Fate, str] = {
    "covered": "in a case that trains without a recorded fault",
    "known": "only in cases that run into a recorded fault",
    "refused": "only in cases that must be refused",
    "skipped": "possible, but in no selected case",
    "excluded": "excluded by rules",
}


class Tuple(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of values and what became of it.

    covered: a selected case contains it that trains and runs into no recorded fault. known: only cases with a recorded
    fault can contain it, and a selected one does. refused: no case that trains can, and a selected case that must be
    refused does. skipped: possible, but none of these. excluded: impossible because of `rules`, one name when a single
    rule forbids it, several when only together they leave no cell.
    """

    block: str
    values: tuple[str, ...]
    fate: Fate
    rules: tuple[str, ...] = ()


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    strength: int
    tuples: tuple[Tuple, ...]
    reasons: Mapping[str, str] = {}  # of the rules that exclude something, by name

    @property
    def counts(self) -> dict[Fate, int]:
        return {fate: sum(entry.fate == fate for entry in self.tuples) for fate in FATES}

    @property
    def by_rule(self) -> dict[str, int]:
        """Number of impossible combinations by rule, sorted by name; one under several rules counts for each."""
        names = [name for entry in self.tuples for name in entry.rules]
        return {name: names.count(name) for name in sorted(set(names))}

    def of(self, fate: Fate) -> tuple[Tuple, ...]:
        """The combinations with this fate, in order."""
        return tuple(entry for entry in self.tuples if entry.fate == fate)


def coverage(selection: Selection, strength: int) -> Coverage:
    """What became of every combination of `strength` values in every block of the selection's file."""
    return Coverage(
        name=selection.name,
        strength=strength,
        tuples=tuple(entry for space in selection.spaces for entry in _account(space, selection, strength)),
        reasons={
            table.rule.name: table.rule.reason for space in selection.spaces for table in tables_of(space, "excluded")
        },
    )


# What a case must avoid so that what it contains has this fate, the best one first.
_BARRED: dict[Fate, tuple[Kind, ...]] = {
    "covered": ("excluded", "refused", "known"),
    "known": ("excluded", "refused"),
    "refused": ("excluded",),
}


def _account(space: Space, selection: Selection, strength: int) -> Iterable[Tuple]:
    rows = [row for case in selection.cases if (row := space.row_of(case)) is not None]
    fates: dict[Fate, set[Combination]] = {}
    possible: set[Combination] = set()  # what a case of this or a better fate can contain
    for fate, kinds in _BARRED.items():
        barred = tables_of(space, *kinds)
        seen = combinations_in((row for row in rows if not is_hit(row, barred)), strength)
        fates[fate] = seen - possible
        possible |= possible_combinations(space, strength, barred, witnessed=possible | seen).keys()
    blocking = _BlockingRules(space, tables_of(space, "excluded"))
    for combination in combinations(space, strength):
        contained: Fate | None = next((fate for fate, of_fate in fates.items() if combination in of_fate), None)
        fate = contained or ("skipped" if combination in possible else "excluded")
        rules = blocking.of(combination) if fate == "excluded" else ()
        values = tuple(space.block.groups[factor].label(value) for factor, value in combination)
        yield Tuple(block=space.block.name, values=values, fate=fate, rules=rules)


class _BlockingRules:
    """Finds which rules make a combination impossible; remembers what it found, for combinations share causes."""

    def __init__(self, space: Space, tables: Sequence[Table]) -> None:
        self._space = space
        self._tables = tables
        self._joint: dict[Combination, tuple[str, ...]] = {}

    def of(self, combination: Combination) -> tuple[str, ...]:
        """Names of the rules that forbid it outright, else of a smallest set that together leaves no cell."""
        chosen = dict(combination)
        outright = [table.rule.name for table in self._tables if _forbids(table, chosen)]
        if outright:
            return tuple(dict.fromkeys(outright))
        for known, names in self._joint.items():
            if set(known) <= set(combination):
                return names
        return self._joint.setdefault(combination, self._smallest(chosen))

    def _smallest(self, chosen: Mapping[int, int]) -> tuple[str, ...]:
        """Drop rules one by one while the combination stays impossible."""
        needed = list(self._tables)
        for table in self._tables:
            fewer = [other for other in needed if other is not table]
            if self._space.complete(chosen, fewer) is None:
                needed = fewer
        return tuple(dict.fromkeys(table.rule.name for table in needed))


def _forbids(table: Table, chosen: Mapping[int, int]) -> bool:
    row = tuple(chosen[factor] for factor in table.factors if factor in chosen)
    return len(row) == len(table.factors) and row in table.hits


class RuleCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of cells that one rule applies to. A cell under two rules counts for both."""

    rule: Rule
    kind: Kind
    cells: int


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """The cells that have the given values, and the rules that apply to them."""

    cells: int
    counts: tuple[RuleCount, ...]


def count_cells(file: CaseFile, values: Mapping[str, object]) -> Census:
    total = 0
    counts: dict[tuple[str, Kind], RuleCount] = {}
    for space in spaces_of(file.blocks, file.max_world_size):
        allowed = _allowed(space, values)
        total += math.prod(len(indices) for indices in allowed)
        for table in space.tables:
            key = (table.rule.name, table.kind)
            earlier = counts[key].cells if key in counts else 0
            cells = earlier + _matching_cells(table, allowed)
            counts[key] = RuleCount(rule=table.rule, kind=table.kind, cells=cells)
    return Census(cells=total, counts=tuple(count for count in counts.values() if count.cells))


def _allowed(space: Space, values: Mapping[str, object]) -> list[frozenset[int]]:
    """For every factor of the space the value indices that agree with `values`; none if the base disagrees."""
    allowed = [frozenset(range(size)) for size in space.sizes]
    defaults = {**axis_values(case_from_axes({})), **space.block.base}
    for name, value in values.items():
        setting = [
            factor for factor, group in enumerate(space.block.groups) if any(name in own for own in group.values)
        ]
        if not setting and defaults.get(name) != value:
            return [frozenset() for _ in allowed]
        for factor in setting:
            options = space.block.groups[factor].values
            agreeing = (index for index, own in enumerate(options) if own.get(name, defaults.get(name)) == value)
            allowed[factor] &= frozenset(agreeing)
    return allowed


def _matching_cells(table: Table, allowed: list[frozenset[int]]) -> int:
    matching = sum(
        all(index in allowed[factor] for factor, index in zip(table.factors, hit, strict=True)) for hit in table.hits
    )
    return matching * math.prod(len(indices) for factor, indices in enumerate(allowed) if factor not in table.factors)
