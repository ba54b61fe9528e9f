"""The cells of a matrix that hold given axis values, and which rules forbid how many of them.

Owns the arithmetic behind `fp8-harness explain axis=value`. Rules and spaces are `spec/`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from harness.spec.axes import axis_values, case_from_axes
from harness.spec.casefile import CaseFile
from harness.spec.rules import Rule
from harness.spec.space import Kind, Space, Table, spaces_of


class RuleCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the looked-at cells one rule applies to. A cell under two rules counts for both."""

    rule: Rule
    kind: Kind
    cells: int


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the cells that hold the given values."""

    cells: int
    counts: tuple[RuleCount, ...]


def count_cells(file: CaseFile, values: Mapping[str, object]) -> Census:
    """The census of all cells of a case file that hold these axis values."""
    total = 0
    found: dict[tuple[str, Kind], RuleCount] = {}
    for space in spaces_of(file.blocks, file.max_world_size):
        allowed = _allowed(space, values)
        total += math.prod(len(indices) for indices in allowed)
        for table in space.tables:
            key = (table.rule.name, table.kind)
            earlier = found[key].cells if key in found else 0
            cells = earlier + _cells_hit(table, allowed)
            found[key] = RuleCount(rule=table.rule, kind=table.kind, cells=cells)
    return Census(cells=total, counts=tuple(count for count in found.values() if count.cells))


def _allowed(space: Space, values: Mapping[str, object]) -> list[frozenset[int]]:
    """For every factor of the space the value indices that agree with `values`; none at all if its base does not."""
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


def _cells_hit(table: Table, allowed: list[frozenset[int]]) -> int:
    hits = sum(
        all(index in allowed[factor] for factor, index in zip(table.factors, hit, strict=True)) for hit in table.hits
    )
    return hits * math.prod(len(indices) for factor, indices in enumerate(allowed) if factor not in table.factors)
