"""The matrix: which cells of a case file's blocks become cases.

How a covering array is made is `cover.py`'s, what a cell is and which rules forbid it is `space.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from harness.errors import HarnessError
from harness.spec.case import Case
from harness.spec.casefile import CaseFile, Strength
from harness.spec.caseid import case_id
from harness.spec.cover import combinations_in, covering_rows, possible_combinations
from harness.spec.space import Kind, Row, Space, Table, spaces_of


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of one file: must-run ones first, then those of every block. No case is in it twice.

    `excluded` counts cells by rule; a cell under two rules counts for both.
    """

    name: str
    cases: tuple[Case, ...]
    candidates: int
    excluded: Mapping[str, int]
    file: CaseFile

    @property
    def empty(self) -> bool:
        """True when nothing is selected: the caller's error to raise."""
        return not self.cases


def select(file: CaseFile) -> Selection:
    """The selection of a case file; the same for the same file, always. HarnessError on an impossible matrix."""
    try:
        spaces = spaces_of(file.blocks, file.max_world_size)
    except HarnessError as error:
        raise HarnessError(error.what, where=f"{file.where}: {error.where}", fix=error.fix) from error
    cases = {case_id(case): case for case in file.cases}
    for space in spaces:
        seeds = [row for case in cases.values() if (row := space.row_of(case)) is not None]
        for row in _chosen_rows(space, file.strength, seeds):
            case = space.case(row)
            cases.setdefault(case_id(case), case)
    return Selection(
        name=file.name,
        cases=tuple(cases.values()),
        candidates=len(file.cases) + sum(space.cells for space in spaces),
        excluded=_count_excluded(spaces),
        file=file,
    )


def tables_of(space: Space, kind: Kind) -> list[Table]:
    """The tables of this kind."""
    return [table for table in space.tables if table.kind == kind]


def _chosen_rows(space: Space, strength: Strength, seeds: Sequence[Row]) -> list[Row]:
    """Cells that contain every combination a training case can; then refused ones for what only they can contain.

    `seeds` are cells that are selected anyway. What a refused case contains is never executed, so it counts only where
    no training case could contain it.
    """
    barred = tables_of(space, "excluded")
    training = [*barred, *tables_of(space, "refused")]
    if strength == "full":
        return [row for row in itertools.product(*map(range, space.sizes)) if not is_hit(row, barred)]
    trainable = possible_combinations(space, strength, training)
    seen = combinations_in((row for row in seeds if not is_hit(row, training)), strength)
    rows = covering_rows(space, strength, training, [c for c in trainable if c not in seen])
    assert trainable.keys() <= seen | combinations_in(rows, strength), "the covering array has a hole"
    seen = combinations_in((row for row in seeds if not is_hit(row, barred)), strength)
    refusable = possible_combinations(space, strength, barred, witnessed=trainable.keys() | seen)
    only_refused = [c for c in refusable if c not in trainable and c not in seen]
    return rows + covering_rows(space, strength, barred, only_refused)


def is_hit(row: Row, tables: Sequence[Table]) -> bool:
    """True when one of these tables applies to the cell."""
    return any(tuple(row[factor] for factor in table.factors) in table.hits for table in tables)


def _count_excluded(spaces: Sequence[Space]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for space in spaces:
        for table in tables_of(space, "excluded"):
            counts[table.rule.name] = counts.get(table.rule.name, 0) + space.cells_hit(table)
    return dict(sorted(counts.items()))
