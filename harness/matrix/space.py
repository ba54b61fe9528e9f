"""The space of one matrix block: its cells, which rules forbid some of them, and few that cover its combinations.

A cell (`Row`) holds one value index per factor. Every rule is tabulated once over the few factors that it reads, so
that checking, counting and completing cells never builds a `Case`. Which cells become cases is in `tier.py`.

Covering arrays come from its own greedy generator, one cell at a time, because most cells of our spaces are
forbidden: general generators (covertable 3.2 was tried) lose their way there and give about ten times the cells in a
hundred times the time.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_values, case_from_axes, ignored_axes
from harness.matrix.case import Case
from harness.matrix.casefile import AxisGroup, Block
from harness.matrix.layout import MESH_AXES
from harness.matrix.rules import EXCLUSIONS, REFUSALS, Exclusion, Rule

Row = tuple[int, ...]
# excluded: left out. refused: runs, and must end in an error. known: runs into a recorded upstream fault.
Kind = Literal["excluded", "refused", "known"]

IGNORED_OPTION = Exclusion(
    name="ignored_option",
    reason="a value that means nothing next to the others (an FP8 option with bf16, a TP option at tp 1, ...) would "
    "repeat another case under its name",
    source="docs/architecture.md",
    axes=tuple(AXES),
    when=lambda case: False,  # a case cannot hold such a value: only cells of a matrix can
)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One rule over one block: the value combinations of `factors` (ascending positions) that it applies to."""

    rule: Rule
    kind: Kind
    factors: tuple[int, ...]
    hits: frozenset[Row]


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of one block. `tables` holds only rules that apply to some cell."""

    block: Block
    tables: tuple[Table, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(group.values) for group in self.block.groups)

    @property
    def cells(self) -> int:
        return math.prod(self.sizes)

    def case(self, row: Row) -> Case:
        return _build(self.block, _merged(self.block, dict(enumerate(row))))

    def row_of(self, case: Case) -> Row | None:
        values = axis_values(case)
        indices = (  # several of a group where one value is part of another: {tp = 1} of the case of {dp_shard = 2}
            [i for i, value in enumerate(group.values) if value.items() <= values.items()]
            for group in self.block.groups
        )
        return next((row for row in itertools.product(*indices) if self.case(row) == case), None)

    def cells_hit(self, table: Table) -> int:
        """Number of cells that a rule applies to. Cells hit by several rules count for each of them."""
        others = [size for factor, size in enumerate(self.sizes) if factor not in table.factors]
        return len(table.hits) * math.prod(others)

    def complete(self, partial: Mapping[int, int], avoid: Sequence[Table], *, turn: int = 0) -> Row | None:
        """Return the first cell in a fixed order that agrees with `partial` and no table in `avoid` hits, or None.

        Every `turn` has its own order, and other cells first.
        """
        starts = (turn // (i + 1) % size for i, size in enumerate(self.sizes))
        domains = [
            (partial[i],) if i in partial else (*range(start, size), *range(start))
            for i, (size, start) in enumerate(zip(self.sizes, starts, strict=True))
        ]
        return _search(domains, avoid)


def is_hit(row: Row, tables: Sequence[Table]) -> bool:
    return any(tuple(row[factor] for factor in table.factors) in table.hits for table in tables)


def spaces_of(blocks: Sequence[Block], max_world_size: int | None, known: Sequence[Rule] = ()) -> tuple[Space, ...]:
    """Return the space of every block, with all rules tabulated. HarnessError on a cell that is no case at all.

    `known` are the rules of recorded upstream faults.
    """
    kinds: list[tuple[Rule, Kind]] = [(rule, "excluded") for rule in EXCLUSIONS]
    kinds += [(rule, "refused") for rule in REFUSALS]
    kinds += [(rule, "known") for rule in known]
    return tuple(_space(block, [*_world_limit(block, max_world_size), *kinds]) for block in blocks)


def _space(block: Block, kinds: Sequence[tuple[Rule, Kind]]) -> Space:
    tables = (*_ignored_tables(block), *(_tabulate(block, rule, kind) for rule, kind in kinds))
    return Space(block=block, tables=tuple(table for table in tables if table.hits))


def _world_limit(block: Block, of_file: int | None) -> list[tuple[Rule, Kind]]:
    limits = [limit for limit in (block.max_world_size, of_file) if limit is not None]
    if not limits:
        return []
    rule = Exclusion(
        name="max_world_size",
        reason=f"this file asks for worlds of at most {min(limits)} ranks",
        source="max_world_size in [select] or [[matrix]]",
        axes=MESH_AXES,
        when=lambda case: case.world_size > min(limits),
    )
    return [(rule, "excluded")]


def _tabulate(block: Block, rule: Rule, kind: Kind) -> Table:
    factors = _factors_setting(block.groups, rule.axes)
    hits = []
    for combination in _combinations(block.groups, factors):
        values = _merged(block, combination)
        if rule.applies(_build(block, {name: value for name, value in values.items() if name in rule.axes})):
            hits.append(tuple(combination.values()))
    return Table(rule=rule, kind=kind, factors=factors, hits=frozenset(hits))


def _ignored_tables(block: Block) -> Iterator[Table]:
    """Yield one table for every part of a case: whether a value counts depends on its own part alone."""
    for part in dict.fromkeys(path[0] for path in AXES.values()):
        names = [name for name, path in AXES.items() if path[0] == part]
        factors = _factors_setting(block.groups, names)
        hits = []
        for combination in _combinations(block.groups, factors):
            values = {name: value for name, value in _merged(block, combination).items() if name in names}
            asked = {name for factor, index in combination.items() for name in block.groups[factor].values[index]}
            _build(block, values)
            if asked.intersection(ignored_axes(values)):
                hits.append(tuple(combination.values()))
        yield Table(rule=IGNORED_OPTION, kind="excluded", factors=factors, hits=frozenset(hits))


def _factors_setting(groups: Sequence[AxisGroup], names: Sequence[str]) -> tuple[int, ...]:
    wanted = set(names)
    return tuple(i for i, group in enumerate(groups) if any(wanted.intersection(value) for value in group.values))


def _combinations(groups: Sequence[AxisGroup], factors: Sequence[int]) -> Iterator[dict[int, int]]:
    for indices in itertools.product(*(range(len(groups[factor].values)) for factor in factors)):
        yield dict(zip(factors, indices, strict=True))


def _merged(block: Block, indices: Mapping[int, int]) -> dict[str, object]:
    values = dict(block.base)
    for factor, index in indices.items():
        values |= block.groups[factor].values[index]
    return values


def _build(block: Block, values: dict[str, object]) -> Case:
    try:
        return case_from_axes(values)
    except HarnessError as error:
        raise HarnessError(error.what, where=f"matrix '{block.name}'", fix=error.fix) from error


def _search(
    domains: list[tuple[int, ...]], avoid: Sequence[Table], settled: frozenset[int] | None = None
) -> Row | None:
    """Depth-first search over the factor with the fewest values left. `settled`: factors that changed; None: all."""
    pruned = _prune(domains, avoid, settled)
    if pruned is None:
        return None
    open_factors = [i for i, domain in enumerate(pruned) if len(domain) > 1]
    if not open_factors:
        return tuple(domain[0] for domain in pruned)
    factor = min(open_factors, key=lambda i: len(pruned[i]))
    for value in pruned[factor]:
        narrowed = [*pruned[:factor], (value,), *pruned[factor + 1 :]]
        row = _search(narrowed, avoid, frozenset((factor,)))
        if row is not None:
            return row
    return None


def _prune(
    domains: list[tuple[int, ...]], avoid: Sequence[Table], settled: frozenset[int] | None
) -> list[tuple[int, ...]] | None:
    """Drop values that a table forbids once all but one of its factors are decided; None when nothing is left."""
    domains = list(domains)
    waiting = [table for table in avoid if settled is None or not settled.isdisjoint(table.factors)]
    while waiting:
        table = waiting.pop()
        undecided = [factor for factor in table.factors if len(domains[factor]) > 1]
        if len(undecided) > 1:
            continue
        target = undecided[0] if undecided else table.factors[0]
        kept = _allowed(table, domains, target)
        if not kept:
            return None
        if len(kept) < len(domains[target]):
            domains[target] = kept
            waiting += [other for other in avoid if other is not table and target in other.factors]
    return domains


def _allowed(table: Table, domains: Sequence[tuple[int, ...]], target: int) -> tuple[int, ...]:
    """Return the values of `target` that the table allows, given the decided values of its other factors."""
    position = table.factors.index(target)
    row = [domains[factor][0] for factor in table.factors]
    before, after = tuple(row[:position]), tuple(row[position + 1 :])
    return tuple(value for value in domains[target] if (*before, value, *after) not in table.hits)


Combination = tuple[tuple[int, int], ...]  # (factor, value) pairs, ascending by factor


def combinations(space: Space, strength: int) -> Iterator[Combination]:
    """Yield every combination of values of `strength` factors (all factors when there are fewer), possible or not.

    Factors that their block does not combine are left out.
    """
    sizes = space.sizes
    for factors in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        if not space.block.combines(space.block.groups[factor].name for factor in factors):
            continue
        for values in itertools.product(*(range(sizes[factor]) for factor in factors)):
            yield tuple(zip(factors, values, strict=True))


def combinations_in(rows: Iterable[Row], strength: int) -> set[Combination]:
    contained: set[Combination] = set()
    for row in rows:
        contained.update(itertools.combinations(enumerate(row), min(strength, len(row))))
    return contained


def possible_combinations(
    space: Space, strength: int, avoid: Sequence[Table], *, witnessed: Collection[Combination] = ()
) -> dict[Combination, None]:
    """Return the combinations that some cell contains which no table in `avoid` hits, in the order of `combinations`.

    `witnessed` are combinations already known to be possible.
    """
    known = set(witnessed)
    possible: dict[Combination, None] = {}
    turns = itertools.count()  # cells that differ contain more
    for combination in combinations(space, strength):
        if combination not in known:
            row = space.complete(dict(combination), avoid, turn=next(turns))
            if row is None:
                continue
            known |= combinations_in([row], strength)
        possible[combination] = None
    return possible


def covering_rows(space: Space, strength: int, avoid: Sequence[Table], wanted: Iterable[Combination]) -> list[Row]:
    """Return the cells that contain every wanted combination and are hit by no table in `avoid`; always the same ones.

    Every wanted combination must be possible under `avoid`.
    """
    missing = dict.fromkeys(wanted)
    rows = []
    while missing:
        row = _extended(space, next(iter(missing)), avoid, missing.keys(), strength)
        rows.append(row)
        for combination in combinations_in([row], strength):
            missing.pop(combination, None)
    return rows


def _extended(
    space: Space, start: Combination, avoid: Sequence[Table], missing: Collection[Combination], strength: int
) -> Row:
    """Return a cell with `start`, extended greedily by the value that adds most missing combinations."""
    chosen = dict(start)
    gains: dict[tuple[int, int], int] = {
        (factor, value): 0 for factor, size in enumerate(space.sizes) if factor not in chosen for value in range(size)
    }
    _add_gains(gains, list(itertools.combinations(start, strength - 1)), missing)
    while gains:
        best = max(gains, key=lambda pair: gains[pair])  # the first of equals: low indices, which are the cheap values
        if gains[best] == 0:
            break
        joined = chosen | dict([best])
        if space.complete(joined, avoid) is None:
            del gains[best]
            continue
        for pair in [pair for pair in gains if pair[0] == best[0]]:
            del gains[pair]
        others = itertools.combinations(chosen.items(), strength - 2)
        _add_gains(gains, [(*other, best) for other in others], missing)
        chosen = joined
    row = space.complete(chosen, avoid)
    assert row is not None, f"{start} is not possible"
    return row


def _add_gains(
    gains: dict[tuple[int, int], int], partners: Sequence[Combination], missing: Collection[Combination]
) -> None:
    for pair in gains:
        gains[pair] += sum(tuple(sorted((*partner, pair))) in missing for partner in partners)
