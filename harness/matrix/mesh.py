"""The device mesh of a layout: the coordinates of every rank, and its peers along mesh axes.

Expectations, checks and probes all use this module. Ranks are numbered as in torch's DeviceMesh: the last axis varies
fastest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping

from harness.errors import HarnessError
from harness.matrix.layout import DP_AXES, OTHERS, REST, Layout, ranks_of


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """The coordinate of `rank` on every axis."""
    found = {}
    for axis, degree in reversed(layout.mesh.items()):
        rank, found[axis] = divmod(rank, degree)
    return found


def dp_rank(layout: Layout, rank: int) -> int:
    """Which part of the global batch `rank` trains on; ranks that differ on other axes alone share one."""
    mine = coordinates(layout, rank)
    return _position((mine[axis], layout.mesh[axis]) for axis in DP_AXES)


def peers(layout: Layout, rank: int, axes: Collection[str]) -> tuple[int, ...]:
    """The ranks that differ from `rank` only on these axes, including itself, ascending."""
    return _peers(layout, rank, frozenset(axes))


@functools.lru_cache(maxsize=4096)
def _peers(layout: Layout, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    """Checks ask for the same ranks once per cast."""
    mine, mesh = coordinates(layout, rank), layout.mesh
    ranges = (range(degree) if axis in axes else (mine[axis],) for axis, degree in mesh.items())
    return tuple(_position(zip(place, mesh.values(), strict=True)) for place in itertools.product(*ranges))


def left_over(ranks: int, degrees: Mapping[str, object], *, where: str) -> int:
    """The degree of the axis `REST` among so many ranks. Raises HarnessError where the other axes do not divide them.

    `degrees`: of the other axes, by name. `where`: who gave them.
    """
    found, odd = divmod(ranks, others := ranks_of(degrees, OTHERS))
    if odd:
        what = f"{ranks} ranks are no multiple of {' x '.join(reversed(OTHERS))} = {others}."
        raise HarnessError(what, where=where, fix="give a multiple, or other degrees.")
    return found


def device_mesh(layout: Layout, *, fsdp: bool) -> dict[str, int]:
    """The axes that a run has a mesh of: those of several ranks, and that of FSDP2 where it is applied to one rank."""
    return {axis: degree for axis, degree in layout.mesh.items() if degree > 1 or (fsdp and axis == REST)}


def _position(place: Iterable[tuple[int, int]]) -> int:
    """The number of a place, of which every axis has its coordinate and its degree."""
    number = 0
    for coordinate, degree in place:
        number = number * degree + coordinate
    return number


def axis_of_group(layout: Layout, rank: int, ranks: tuple[int, ...]) -> str:
    """The mesh axis along which `ranks` are the peers of `rank`; several axes are joined by "+".

    "world" for all ranks of a mesh with several axes, "self" for a group of one, "ranks 0,3" for any other group.
    """
    used = [axis for axis, degree in layout.mesh.items() if degree > 1]
    if len(ranks) == 1:
        return "self"
    for count in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, count):
            if ranks == peers(layout, rank, chosen):
                return "world" if 1 < count == len(used) else "+".join(chosen)
    return f"ranks {','.join(map(str, ranks))}"
