"""The difference of two runs: which recorded numbers of the second are not those of the first, causes first.

Compares saved traces (`tables.py`) row by row, in the order in which a fault spreads: casts and their scales, matmuls,
collectives, saved memory, gradients, losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from harness.checks.assembly import same_number
from harness.checks.occurrences import with_occurrence
from harness.plural import counted
from harness.report.sections import Block, Section, Table
from harness.tables import TABLES, Rows, Value
from harness.tables import Table as Recorded


class Change(msgspec.Struct, frozen=True, kw_only=True):
    column: str
    first: Value
    second: Value


class TableDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs in one table. `where` and `changes` are of the first row that differs, in execution order."""

    table: str
    rows: int  # that both runs have
    different: int
    only_first: int  # rows that one run alone has
    only_second: int
    where: dict[str, Value] = {}
    changes: tuple[Change, ...] = ()

    @property
    def equal(self) -> bool:
        """True when both runs have the same rows with the same values."""
        return not (self.different or self.only_first or self.only_second)


def difference(first: Mapping[str, Rows], second: Mapping[str, Rows]) -> tuple[TableDifference, ...]:
    return tuple(_of_table(table, first[table.name], second[table.name]) for table in TABLES)


def _of_table(table: Recorded, first: Rows, second: Rows) -> TableDifference:
    left, right = _by_key(table, first), _by_key(table, second)
    common = [key for key in left if key in right]
    changed = [(key, changes) for key in common if (changes := _changes(table, left[key], right[key]))]
    earliest = min(changed, key=lambda item: left[item[0]]["step"], default=None)
    return TableDifference(
        table=table.name,
        rows=len(common),
        different=len(changed),
        only_first=len(left) - len(common),
        only_second=len(right) - len(common),
        where={} if earliest is None else {name: left[earliest[0]][name] for name in table.keys},
        changes=() if earliest is None else earliest[1],
    )


def _by_key(table: Recorded, rows: Rows) -> dict[tuple[tuple[Value, ...], int], dict[str, Value]]:
    return with_occurrence((tuple(row[name] for name in table.keys), row) for row in rows)


def _changes(table: Recorded, first: Mapping[str, Value], second: Mapping[str, Value]) -> tuple[Change, ...]:
    return tuple(
        Change(column=name, first=first[name], second=second[name])
        for name in table.values
        if not _equal(first[name], second[name])
    )


def _equal(first: Value, second: Value) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return same_number(first, second)


def difference_blocks(differences: Sequence[TableDifference]) -> tuple[Block, ...]:
    equal = [
        f"{compared.table} ({counted(compared.rows, 'row')})"
        for compared in differences
        if compared.equal and compared.rows
    ]
    missing = [compared.table for compared in differences if compared.equal and not compared.rows]
    return (
        *(_section(compared) for compared in differences if not compared.equal),
        *([f"equal: {', '.join(equal)}"] if equal else []),
        *([f"not recorded: {', '.join(missing)}"] if missing else []),
    )


def _section(compared: TableDifference) -> Section:
    alone = tuple(
        f"{counted(count, 'row')} only in the {which} run"
        for count, which in ((compared.only_first, "first"), (compared.only_second, "second"))
        if count
    )
    place = ", ".join(f"{name} {value}" for name, value in compared.where.items() if value != "")
    first = Section(title=f"first: {place}", blocks=(Table(rows=tuple(map(_row, compared.changes))),))
    title = f"{compared.table}: {compared.different} of {counted(compared.rows, 'row')} differ"
    return Section(title=title, blocks=(*alone, first))


def _row(change: Change) -> tuple[str, ...]:
    first, second = change.first, change.second
    values = " -> ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in (first, second))
    if isinstance(first, str) or isinstance(second, str):
        return change.column, values, ""
    relative = abs(second - first) / abs(first) if first else math.inf
    return change.column, values, f"({relative:.2g} of it)"
