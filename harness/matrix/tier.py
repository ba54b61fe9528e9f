"""The matrix: which cells of a case file's blocks become cases.

How a covering array is made is `cover.py`'s, what a cell is and which rules forbid it is `space.py`'s.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import msgspec

from harness.errors import HarnessError
from harness.hints import choose_tier
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile, Strength
from harness.matrix.caseid import case_id
from harness.matrix.cover import Combination, combinations_in, covering_rows, possible_combinations
from harness.matrix.known import KnownFault, known_rules
from harness.matrix.space import Kind, Row, Space, Table, is_hit, spaces_of

# A cell under such a rule is not judged as sharply as others, or not at all: it covers nothing that another can cover.
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
        """True when nothing is selected: the caller's error to raise."""
        return not self.cases


def select(file: CaseFile, *, known: Sequence[KnownFault] = (), chosen: Sequence[Case] | None = None) -> Selection:
    """The selection of a case file; the same for the same arguments, always. HarnessError on an impossible matrix.

    `known` are recorded faults: a case that runs into one covers nothing that another case can cover. `chosen` are
    the cases that were chosen for this file; HarnessError when they do not cover it. Without them a covering array is
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
    """The spaces of a file's blocks. HarnessError on an impossible matrix."""
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
    """The combinations that some judged cell contains. Takes most of the time of a selection."""
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
    """Cells that contain every combination; `seeds` are cells that are selected anyway."""
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
    """Cells for what no judged cell can contain: first those with a recorded fault, then those that are refused.

    What a refused case contains is never executed, and what runs into a fault is not judged as sharply, so they count
    only where nothing better can. `judged`: the combinations that some judged cell contains, where they are known.
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
