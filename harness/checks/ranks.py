"""Sets of ranks in words, and the grouping that turns the same finding on 8 ranks into one.

Public names: `rank_names`, `by_value`, `ordered`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from typing import TypeVar

from harness.trace import RankTrace, Run

Value = TypeVar("Value", bound=Hashable)


def ordered(run: Run) -> list[RankTrace]:
    """The traces by rank: what a check says never depends on the order in which ranks answered."""
    return sorted(run.traces, key=lambda trace: trace.rank)


def by_value(run: Run, read: Callable[[RankTrace], Value]) -> dict[Value, list[int]]:
    """Which ranks recorded which value, in the order of the lowest rank."""
    groups: dict[Value, list[int]] = {}
    for trace in ordered(run):
        groups.setdefault(read(trace), []).append(trace.rank)
    return groups


def rank_names(ranks: Iterable[int]) -> str:
    """The ranks in words: "rank 3", "ranks 0-3, 6"."""
    numbers = sorted(set(ranks))
    runs = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"
