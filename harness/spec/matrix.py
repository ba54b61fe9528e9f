"""The matrix: which cells of a case file's blocks become cases.

Covering arrays come from covertable and are verified here. What a cell is and which rules forbid it is `space.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from harness.spec.case import Case
from harness.spec.caseid import case_id
from harness.spec.casefile import CaseFile
from harness.spec.rules import unsupported
from harness.spec.space import Kind, Row, Space, Table, spaces_of

Combination = tuple[tuple[int, int], ...]  # (factor, value) pairs, ascending by factor


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of one file: must-run ones first, then those of every block. No case is in it twice.

    `excluded` and `unsupported` count cells (and must-run cases) by rule; a cell under two rules counts for both.
    """

    name: str
    cases: tuple[Case, ...]
    candidates: int
    excluded: Mapping[str, int]
    unsupported: Mapping[str, int]
    file: CaseFile

    @property
    def empty(self) -> bool:
        """True when nothing is selected: the caller's error to raise."""
        return not self.cases


def select(file: CaseFile) -> Selection:
    """The selection of a case file; the same for the same file, always. HarnessError on an impossible matrix."""
    spaces = spaces_of(file.blocks, file.max_world_size)
    runnable = [case for case in file.cases if not unsupported(case)]
    cases = {case_id(case): case for case in runnable}
    for space in spaces:
        seeds = [row for row in map(space.row_of, cases.values()) if row is not None]
        for row in _chosen_rows(space, file.strength, seeds):
            case = space.case(row)
            cases.setdefault(case_id(case), case)
    return Selection(
        name=file.name,
        cases=tuple(cases.values()),
        candidates=len(file.cases) + sum(space.cells for space in spaces),
        excluded=_count(spaces, "excluded", ()),
        unsupported=_count(spaces, "unsupported", file.cases),
        file=file,
    )


def combinations(space: Space, strength: int) -> Iterator[Combination]:
    """Every combination of values of `strength` factors (all factors when there are fewer), possible or not."""
    sizes = space.sizes
    for factors in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        for values in itertools.product(*(range(sizes[factor]) for factor in factors)):
            yield tuple(zip(factors, values, strict=True))


def covered_by(rows: Iterable[Row], strength: int) -> set[Combination]:
    """The combinations that these cells contain."""
    return {
        combination
        for row in rows
        for combination in itertools.combinations(enumerate(row), min(strength, len(row)))
    }


def tables_of(space: Space, *kinds: Kind) -> list[Table]:
    """The tables of these kinds."""
    return [table for table in space.tables if table.kind in kinds]


def _chosen_rows(space: Space, strength: int | str, seeds: Sequence[Row]) -> list[Row]:
    """Cells that cover every combination that a training case can; then refused ones for what only they contain."""
    barred = tables_of(space, "excluded", "unsupported")
    if not isinstance(strength, int):
        rows = itertools.product(*(range(size) for size in space.sizes))
        return [row for row in rows if not _hit(row, barred)]
    training = [*barred, *tables_of(space, "refused")]
    rows = _covering_array(space, strength, training, [row for row in seeds if not _hit(row, training)])
    refused = [row for row in seeds if _hit(row, training) and not _hit(row, barred)]
    rows += _refused_rows(space, strength, training, barred, covered_by([*rows, *refused], strength))
    return rows


def _covering_array(space: Space, strength: int, avoid: Sequence[Table], seeds: Sequence[Row]) -> list[Row]:
    from covertable.main import Controller

    if space.complete({}, avoid) is None:
        return []
    strength = min(strength, len(space.sizes))
    controller = Controller(
        {str(factor): list(range(size)) for factor, size in enumerate(space.sizes)},
        strength=strength,
        presets=[{str(factor): value for factor, value in enumerate(row)} for row in seeds],
        constraints=[_constraint(factors, hits) for factors, hits in _joined(avoid).items()],
    )
    return [tuple(made[str(factor)] for factor in range(len(space.sizes))) for made in controller.make()]


def _joined(tables: Sequence[Table]) -> dict[tuple[int, ...], set[Row]]:
    """Rules over the same factors as one: the generator pays for every constraint."""
    joined: dict[tuple[int, ...], set[Row]] = {}
    for table in tables:
        joined.setdefault(table.factors, set()).update(table.hits)
    return joined


def _constraint(factors: tuple[int, ...], hits: set[Row]) -> dict[str, object]:
    keys = [str(factor) for factor in factors]
    return {
        "operator": "fn",
        "requires": keys,
        "evaluate": lambda row: tuple(row[key] for key in keys) not in hits,
    }


def _refused_rows(
    space: Space, strength: int, training: Sequence[Table], barred: Sequence[Table], covered: set[Combination]
) -> list[Row]:
    """Refused cells for combinations that no training cell contains, packed greedily; this also proves the cover."""
    missing = [combination for combination in combinations(space, strength) if combination not in covered]
    waiting = []
    for combination in missing:
        assert space.complete(dict(combination), training) is None, f"the covering array misses {combination}"
        if space.complete(dict(combination), barred) is not None:
            waiting.append(combination)
    rows = []
    while waiting:
        row = _packed(space, waiting, barred)
        rows.append(row)
        waiting = [combination for combination in waiting if not set(combination) <= set(enumerate(row))]
    return rows


def _packed(space: Space, waiting: Sequence[Combination], barred: Sequence[Table]) -> Row:
    """A possible cell with the first waiting combination and as many of the others as fit, in order."""
    partial: dict[int, int] = dict(waiting[0])
    for combination in waiting[1:]:
        if all(partial.get(factor, value) == value for factor, value in combination):
            joined = partial | dict(combination)
            if space.complete(joined, barred) is not None:
                partial = joined
    row = space.complete(partial, barred)
    assert row is not None
    return row


def _hit(row: Row, tables: Sequence[Table]) -> bool:
    return any(tuple(row[factor] for factor in table.factors) in table.hits for table in tables)


def _count(spaces: Sequence[Space], kind: Kind, cases: Sequence[Case]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for space in spaces:
        for table in tables_of(space, kind):
            counts[table.rule.name] = counts.get(table.rule.name, 0) + space.cells_hit(table)
    for case in cases:
        for rule in unsupported(case):
            counts[rule.name] = counts.get(rule.name, 0) + 1
    return dict(sorted(counts.items()))
