"""How many cells of a matrix have given axis values, and how many of them each rule excludes or refuses.

The arithmetic of `fp8-harness explain axis=value`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.casefile import CaseFile
from harness.matrix.rule import Rule
from harness.matrix.space import Kind, Space, Table, spaces_of


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
    """The census of all cells of a case file that have these axis values."""
    total = 0
    found: dict[tuple[str, Kind], RuleCount] = {}
    for space in spaces_of(file.blocks, file.max_world_size):
        allowed = _allowed(space, values)
        total += math.prod(len(indices) for indices in allowed)
        for table in space.tables:
            key = (table.rule.name, table.kind)
            earlier = found[key].cells if key in found else 0
            cells = earlier + _matching_cells(table, allowed)
            found[key] = RuleCount(rule=table.rule, kind=table.kind, cells=cells)
    return Census(cells=total, counts=tuple(count for count in found.values() if count.cells))


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
