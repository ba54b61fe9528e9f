"""The device mesh of a layout: the coordinates of every rank, and its peers along mesh axes.

Expectations, checks and probes all use this module. Ranks are numbered as in torch's DeviceMesh: the last axis varies
fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from harness.matrix.case import Layout

AXES = ("dp_replicate", "dp_shard", "tp")  # outermost first
DP_AXES = AXES[:2]


def axis_size(layout: Layout, axis: str) -> int:
    """Number of ranks along one axis."""
    size: int = getattr(layout, axis)
    return size


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """The coordinate of `rank` on every axis."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, axis_size(layout, axis))
    return found


def dp_rank(layout: Layout, rank: int) -> int:
    """Which part of the global batch `rank` trains on: TP ranks, which vary fastest, share one."""
    return rank // layout.tp


def peers(layout: Layout, rank: int, axes: Collection[str]) -> tuple[int, ...]:
    """The ranks that differ from `rank` only on these axes, including itself, ascending."""
    mine = coordinates(layout, rank)
    ranges = (range(axis_size(layout, axis)) if axis in axes else (mine[axis],) for axis in AXES)
    return tuple((i * layout.dp_shard + j) * layout.tp + k for i, j, k in itertools.product(*ranges))


def axis_of_group(layout: Layout, rank: int, ranks: tuple[int, ...]) -> str:
    """The mesh axis along which `ranks` are the peers of `rank`; several axes are joined by "+".

    "world" for all ranks of a mesh with several axes, "self" for a group of one, "ranks 0,3" for any other group.
    """
    used = [axis for axis in AXES if axis_size(layout, axis) > 1]
    if len(ranks) == 1:
        return "self"
    for count in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, count):
            if ranks == peers(layout, rank, chosen):
                return "world" if 1 < count == len(used) else "+".join(chosen)
    return f"ranks {','.join(map(str, ranks))}"
