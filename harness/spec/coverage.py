"""The coverage account: what became of every pair or triple of axis values that a case file could combine.

Pure bookkeeping over a selection; which cells were chosen and why is decided in `matrix.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from harness.spec.cover import Combination, combinations, combinations_in, possible_combinations
from harness.spec.matrix import Selection, tables_of
from harness.spec.rules import expected_refusal
from harness.spec.space import Space, Table, spaces_of

Fate = Literal["covered", "refused", "skipped", "excluded"]
FATES: tuple[Fate, ...] = ("covered", "refused", "skipped", "excluded")


class Tuple(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of values and what became of it.

    covered: a selected case that must train contains it. refused: none can train, and a selected case that must be
    refused contains it. skipped: possible, but neither of the two. excluded: impossible because of
    `rules`, one name when a single rule forbids it, several when only together they leave no cell.
    """

    block: str
    values: tuple[str, ...]
    fate: Fate
    rules: tuple[str, ...] = ()


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one selection at one strength."""

    name: str
    strength: int
    tuples: tuple[Tuple, ...]

    @property
    def counts(self) -> dict[Fate, int]:
        """Number of combinations by fate, every fate present."""
        return {fate: sum(found.fate == fate for found in self.tuples) for fate in FATES}

    @property
    def by_rule(self) -> dict[str, int]:
        """Number of impossible combinations by rule, sorted by name; one under several rules counts for each."""
        names = [name for found in self.tuples for name in found.rules]
        return {name: names.count(name) for name in sorted(set(names))}

    def of(self, fate: Fate) -> tuple[Tuple, ...]:
        """The combinations with this fate, in order."""
        return tuple(found for found in self.tuples if found.fate == fate)


def coverage(selection: Selection, strength: int) -> Coverage:
    """What became of every combination of `strength` values in every block of the selection's file."""
    spaces = spaces_of(selection.file.blocks, selection.file.max_world_size)
    return Coverage(
        name=selection.name,
        strength=strength,
        tuples=tuple(found for space in spaces for found in _account(space, selection, strength)),
    )


def _account(space: Space, selection: Selection, strength: int) -> Iterable[Tuple]:
    chosen = [(case, row) for case in selection.cases if (row := space.row_of(case)) is not None]
    trained = combinations_in((row for case, row in chosen if expected_refusal(case) is None), strength)
    refused = combinations_in((row for case, row in chosen if expected_refusal(case) is not None), strength)
    barring = tables_of(space, "excluded")
    training = [*barring, *tables_of(space, "refused")]
    trainable = trained | possible_combinations(space, strength, training, witnessed=trained).keys()
    runnable = trainable | possible_combinations(space, strength, barring, witnessed=trainable | refused).keys()
    culprits = _Culprits(space, barring)
    for combination in combinations(space, strength):
        rules: tuple[str, ...] = ()
        fate: Fate
        if combination in trained:
            fate = "covered"
        elif combination in refused and combination not in trainable:
            fate = "refused"
        elif combination in runnable:
            fate = "skipped"
        else:
            fate = "excluded"
            rules = culprits.of(combination)
        values = tuple(space.block.groups[factor].label(value) for factor, value in combination)
        yield Tuple(block=space.block.name, values=values, fate=fate, rules=rules)


class _Culprits:
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
