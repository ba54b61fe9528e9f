"""Covering arrays: few cells of a space that together contain every possible combination of `strength` values.

A greedy generator of its own, one cell at a time, because most cells of our spaces are forbidden: general generators
(covertable 3.2 was tried) lose their way there and give about ten times the cells in a hundred times the time.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from harness.matrix.space import Row, Space, Table

Combination = tuple[tuple[int, int], ...]  # (factor, value) pairs, ascending by factor


def combinations(space: Space, strength: int) -> Iterator[Combination]:
    """Every combination of values of `strength` factors (all factors when there are fewer), possible or not.

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
    """The combinations that some cell contains which no table in `avoid` hits, in the order of `combinations`.

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
    """Cells that contain every wanted combination and are hit by no table in `avoid`; always the same ones.

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
    """A cell with `start`, extended greedily by the value that adds most missing combinations."""
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
