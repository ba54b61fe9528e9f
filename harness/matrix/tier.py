"""The matrix: which cells of a case file's blocks become cases, and the coverage account of these.

The account says what became of every pair or triple of axis values that the file could combine, and how many cells have
given values, with the rules that apply to them (`explain axis=value`).
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from harness.errors import HarnessError
from harness.hints import choose_tier
from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile, Strength
from harness.matrix.caseid import case_id
from harness.matrix.records import KnownFault, known_rules
from harness.matrix.rules import Rule
from harness.matrix.space import (
    Combination,
    Kind,
    Row,
    Space,
    Table,
    combinations,
    combinations_in,
    covering_rows,
    is_hit,
    possible_combinations,
    spaces_of,
)

# A cell under such a rule is not checked as sharply as others, or not at all: it covers nothing that another can cover.
_NOT_JUDGED: tuple[Kind, ...] = ("excluded", "refused", "known")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of one file: must-run ones first, then those of every block. No case is in it twice.

    `excluded` counts cells by rule; a cell under two rules counts for both.
    """

    name: str
    cases: tuple[Case, ...]
    candidates: int
    excluded: Mapping[str, int]
    file: CaseFile
    spaces: tuple[Space, ...]  # of the blocks of the file
    known: tuple[KnownFault, ...] = ()  # the recorded faults that were taken into account

    @property
    def empty(self) -> bool:
        """Return True if nothing is selected: the caller's error to raise."""
        return not self.cases


def select(file: CaseFile, *, known: Sequence[KnownFault] = (), chosen: Sequence[Case] | None = None) -> Selection:
    """Return the selection of a case file, the same for the same arguments. HarnessError on an impossible matrix.

    `known` are recorded faults: a case that runs into one covers nothing that another case can cover. `chosen` are
    the cases that were chosen for this file; HarnessError if they do not cover it. Without them a covering array is
    made here.
    """
    spaces = tier_spaces(file, known)
    cases = {case_id(case): case for case in file.cases}
    if chosen is not None:
        cases |= {case_id(case): case for case in chosen}
        _check_covered(file, spaces, list(cases.values()))
    else:
        for space in spaces:
            seeds = [row for case in cases.values() if (row := space.row_of(case)) is not None]
            for row in _covering_rows(space, file.strength, seeds):
                case = space.case(row)
                cases.setdefault(case_id(case), case)
    return Selection(
        name=file.name,
        cases=tuple(cases.values()),
        candidates=len(file.cases) + sum(space.cells for space in spaces),
        excluded=_count_excluded(spaces),
        file=file,
        spaces=spaces,
        known=tuple(known),
    )


def tables_of(space: Space, *kinds: Kind) -> list[Table]:
    return [table for table in space.tables if table.kind in kinds]


def tier_spaces(file: CaseFile, known: Sequence[KnownFault]) -> tuple[Space, ...]:
    """Return the spaces of a file's blocks. HarnessError on an impossible matrix."""
    try:
        return spaces_of(file.blocks, file.max_world_size, known_rules(known))
    except HarnessError as error:
        raise HarnessError(error.what, where=f"{file.where}: {error.where}", fix=error.fix) from error


def _check_covered(file: CaseFile, spaces: Sequence[Space], cases: Sequence[Case]) -> None:
    for space in spaces:
        rows = [row for case in cases if (row := space.row_of(case)) is not None]
        missing = _uncovered(space, rows, _judged(space, file.strength), file.strength)
        if missing:
            first = " / ".join(space.block.groups[factor].label(value) for factor, value in missing[0])
            raise HarnessError(
                f"the chosen cases leave {len(missing)} combinations of '{space.block.name}' uncovered, first {first}.",
                where=file.where,
                fix=f"run `{choose_tier(file.where)}`.",
            )


def _judged(space: Space, strength: Strength) -> Collection[Combination]:
    """Return the combinations that some checked cell contains. Takes most of the time of a selection."""
    if strength == "full":
        return ()
    return possible_combinations(space, strength, tables_of(space, *_NOT_JUDGED)).keys()


def _uncovered(
    space: Space, rows: Sequence[Row], judged: Collection[Combination], strength: Strength
) -> list[Combination]:
    if strength == "full":
        return []
    barred = tables_of(space, *_NOT_JUDGED)
    seen = combinations_in((row for row in rows if not is_hit(row, barred)), strength)
    return [combination for combination in judged if combination not in seen]


def _covering_rows(space: Space, strength: Strength, seeds: Sequence[Row]) -> list[Row]:
    """Return the cells that contain every combination; `seeds` are cells that are selected anyway."""
    if strength == "full":
        barred = tables_of(space, "excluded")
        return [row for row in itertools.product(*map(range, space.sizes)) if not is_hit(row, barred)]
    judged = _judged(space, strength)
    missing = _uncovered(space, seeds, judged, strength)
    rows = covering_rows(space, strength, tables_of(space, *_NOT_JUDGED), missing)
    assert not _uncovered(space, [*seeds, *rows], judged, strength), "the covering array has a hole"
    return rows + second_best_rows(space, strength, [*seeds, *rows], judged)


def second_best_rows(
    space: Space, strength: int, seeds: Sequence[Row], judged: Collection[Combination] | None = None
) -> list[Row]:
    """Return the cells for what no checked cell can contain: first those with a recorded fault, then those refused.

    What a refused case contains is never executed, and what runs into a fault is not checked as sharply, so they count
    only where nothing better can. `judged`: the combinations that some checked cell contains, where they are known.
    """
    rows: list[Row] = []
    done = set(possible_combinations(space, strength, tables_of(space, *_NOT_JUDGED)) if judged is None else judged)
    for kinds in (("excluded", "refused"), ("excluded",)):
        barred = tables_of(space, *kinds)
        seen = combinations_in((row for row in (*seeds, *rows) if not is_hit(row, barred)), strength)
        possible = possible_combinations(space, strength, barred, witnessed=done | seen)
        rows += covering_rows(space, strength, barred, [c for c in possible if c not in done and c not in seen])
        done = set(possible)
    return rows


def _count_excluded(spaces: Sequence[Space]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for space in spaces:
        for table in tables_of(space, "excluded"):
            counts[table.rule.name] = counts.get(table.rule.name, 0) + space.cells_hit(table)
    return dict(sorted(counts.items()))


Fate = Literal["covered", "known", "refused", "skipped", "excluded"]
FATES: dict[Fate, str] = {
    "covered": "in a case without a known issue",
    "known": "only in cases with a known issue",
    "refused": "only in cases with an expected error",
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
        """Return the combinations with this fate, in order."""
        return tuple(entry for entry in self.tuples if entry.fate == fate)


def coverage(selection: Selection, strength: int) -> Coverage:
    """Return the fate of every combination of `strength` values in every block of the selection's file."""
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
        """Return the names of the rules that forbid it outright, else a smallest set that leaves no cell."""
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
