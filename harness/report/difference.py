"""The difference of two runs: which recorded numbers of the second are not those of the first, causes first.

Compares saved traces (`tables.py`) row by row, in the order in which a fault spreads: casts and their scales, matmuls,
collectives, saved memory, gradients, losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from harness.checks.mismatch import same_number
from harness.checks.occurrences import with_occurrence
from harness.plural import counted
from harness.tables import TABLES, Rows, Table, Value

_SHOWN_DIGITS = 6


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One value that differs."""

    column: str
    first: Value
    second: Value

    @property
    def relative(self) -> float | None:
        """How far the second is from the first, relative to it; None for what is no number."""
        if isinstance(self.first, str) or isinstance(self.second, str):
            return None
        distance = abs(self.second - self.first)
        return distance / abs(self.first) if self.first else math.inf


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
    """What differs in every table, in the order of causes."""
    return tuple(_of_table(table, first[table.name], second[table.name]) for table in TABLES)


def _of_table(table: Table, first: Rows, second: Rows) -> TableDifference:
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


def _by_key(table: Table, rows: Rows) -> dict[tuple[tuple[Value, ...], int], dict[str, Value]]:
    """The rows by their keys; rows with equal keys are told apart by their number."""
    return with_occurrence((tuple(row[name] for name in table.keys), row) for row in rows)


def _changes(table: Table, first: Mapping[str, Value], second: Mapping[str, Value]) -> tuple[Change, ...]:
    return tuple(
        Change(column=name, first=first[name], second=second[name])
        for name in table.values
        if not _equal(first[name], second[name])
    )


def _equal(first: Value, second: Value) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return same_number(first, second)


def difference_text(found: tuple[TableDifference, ...]) -> str:
    """One block per table that differs, then the tables that are equal on one line."""
    blocks = [_block(each) for each in found if not each.equal]
    equal = [f"{each.table} ({counted(each.rows, 'row')})" for each in found if each.equal and each.rows]
    missing = [each.table for each in found if each.equal and not each.rows]
    lines = [f"equal: {', '.join(equal)}"] * bool(equal) + [f"not recorded: {', '.join(missing)}"] * bool(missing)
    return "\n".join([*blocks, *lines])


def _block(found: TableDifference) -> str:
    lines = [f"{found.table}: {found.different} of {counted(found.rows, 'row')} differ"]
    for count, which in ((found.only_first, "first"), (found.only_second, "second")):
        if count:
            lines.append(f"  {counted(count, 'row')} only in the {which} run")
    if found.where:
        lines.append(f"  first: {', '.join(f'{name} {value}' for name, value in found.where.items() if value != '')}")
        lines += [f"    {_change(change)}" for change in found.changes]
    return "\n".join(lines)


def _change(change: Change) -> str:
    values = f"{change.column:<12} {_shown(change.first)} -> {_shown(change.second)}"
    relative = change.relative
    return values if relative is None else f"{values}  ({relative:.2g} of it)"


def _shown(value: Value) -> str:
    return f"{value:.{_SHOWN_DIGITS}g}" if isinstance(value, float) else str(value)
