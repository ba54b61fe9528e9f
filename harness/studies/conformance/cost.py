"""Cost: the fewest bytes that a rank must receive to run an operator on given placements.

Searches all ways to redistribute the inputs, one mesh axis at a time, until the operator is local. Follows DTensor's
rules:

- uneven shards are padded to the largest before they are sent;
- a partial input that must be reduced is all-reduced. A reduce-scatter moves half as much, but shards a tensor that was
  not sharded: it is an option only where another input or the target is sharded that way;
- a tensor changes its sharded dim by an all-gather, as DTensor does on a CPU (on CUDA: by an all-to-all).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Mapping
from itertools import product

from harness.matrix.recipes import ITEM_BYTES
from harness.studies.conformance.strategy import MATMULS, SCALES, local_placements, placements_of, reduced_dims
from harness.trace.operator_checks import PARTIALS, OperatorCheck, Placements, shard_dim

_FLOAT8_BYTES = 1
# torchao casts an amax to float64 before it is reduced, so that eager and compiled scales are bit-equal.
_AMAX_BYTES = 8


def cheapest_bytes(check: OperatorCheck) -> float:
    """The budget of a check: the bytes that one rank may receive."""
    shapes = _input_shapes(check)
    inputs = [_unstrided(placements) for placements in check.inputs]
    layouts = [*inputs, *([check.target] if check.target else [])]
    wanted = tuple(frozenset(axis) for axis in zip(*layouts, strict=True))
    paths = [
        _paths(placements, shape, check.axes, _element_bytes(check), wanted)
        for placements, shape in zip(inputs, shapes, strict=True)
    ]
    if check.target:
        return paths[0][check.target]
    if check.op in SCALES:
        reduced = tuple("R" if placement in PARTIALS else placement for placement in inputs[0])
        return paths[0][reduced] + _amax_bytes(check, reduced, inputs[0])
    best = float("inf")
    for by_axis in product(*(local_placements(check, size, shapes) for size in check.axes)):
        targets = zip(*by_axis, strict=True)
        best = min(best, sum(path.get(target, float("inf")) for path, target in zip(paths, targets, strict=True)))
    return best


def _unstrided(placements: Placements) -> Placements:
    """Strided shards as plain shards: their contents differ, their sizes do not."""
    return tuple(placement.replace("T", "S") for placement in placements)


def _element_bytes(check: OperatorCheck) -> int:
    """Bytes per element of the inputs."""
    return _FLOAT8_BYTES if check.op.startswith("f8.") else ITEM_BYTES[check.dtype]


def _input_shapes(check: OperatorCheck) -> list[tuple[int, ...]]:
    if check.op in MATMULS:
        return [check.shape, (check.shape[1], check.sizes[0])]
    if check.op.endswith(".scale"):
        return [check.shape, ()]
    return [check.shape] * len(check.inputs)


def _amax_bytes(check: OperatorCheck, placements: Placements, source: Placements) -> float:
    """Cost of reducing the amax for a scale: one element, or one per row or column.

    A partial input may be reduced by a reduce-scatter instead: its amax is then reduced over that axis too.
    """
    dims = reduced_dims(check)
    kept = tuple(1 if dim in dims else length for dim, length in enumerate(check.shape))
    others = tuple("R" if shard_dim(placement) in dims else placement for placement in placements)
    held = _local_bytes(others, kept, check.axes, _AMAX_BYTES)
    sizes = [
        size
        for placement, before, size in zip(placements, source, check.axes, strict=True)
        if shard_dim(placement) in dims or before in PARTIALS
    ]
    return sum(2 * (size - 1) / size * held for size in sizes)


@functools.cache
def _paths(
    source: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int, wanted: tuple[frozenset[str], ...]
) -> Mapping[Placements, float]:
    """Bytes to reach every placement from `source`, by Dijkstra's algorithm.

    Sharding a replicated tensor is free, and comes last: it must not make an earlier reduction cheaper.
    """
    known: dict[Placements, float] = {}
    queue = [(0.0, source)]
    while queue:
        cost, here = heapq.heappop(queue)
        if here not in known:
            known[here] = cost
            for step, there in _steps(here, shape, axes, element, wanted):
                heapq.heappush(queue, (cost + step, there))
    reached = dict(known)
    for here, cost in sorted(known.items(), key=lambda item: item[1]):
        for there in _local_steps(here, source, wanted, len(shape)):
            reached[there] = min(cost, reached.get(there, float("inf")))
    return reached


def _local_steps(
    here: Placements, source: Placements, wanted: tuple[frozenset[str], ...], ndim: int
) -> Iterator[Placements]:
    """What replicated axes can become without communication: anything if replicated in `source`, else `wanted`."""
    options = [
        (now,) if now != "R" else placements_of(ndim) if before == "R" else {"R", *asked}
        for now, before, asked in zip(here, source, wanted, strict=True)
    ]
    for there in product(*options):
        cut = [axis for axis in range(len(here)) if there[axis] != here[axis]]
        if all(_is_innermost(here, axis, dim) for axis in cut if (dim := shard_dim(there[axis])) is not None):
            yield there


def _steps(
    here: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int, wanted: tuple[frozenset[str], ...]
) -> Iterator[tuple[float, Placements]]:
    """All gathers and reductions over one axis, with the bytes that a rank receives."""
    held = _local_bytes(here, shape, axes, element)
    for axis, placement in enumerate(here):
        size, dim = axes[axis], shard_dim(placement)
        if placement == "R" or (dim is not None and not _is_innermost(here, axis, dim)):
            continue
        if dim is not None:
            yield (size - 1) * held, _replaced(here, axis, "R")
            continue
        yield 2 * (size - 1) / size * held, _replaced(here, axis, "R")
        for new in wanted[axis]:
            new_dim = shard_dim(new)
            if new_dim is not None and new_dim < len(shape) and _is_innermost(here, axis, new_dim):
                there = _replaced(here, axis, new)
                yield (size - 1) * _local_bytes(there, shape, axes, element), there


def _replaced(here: Placements, axis: int, placement: str) -> Placements:
    return (*here[:axis], placement, *here[axis + 1 :])


def _is_innermost(here: Placements, axis: int, dim: int) -> bool:
    """A dim that several axes shard is gathered from the rightmost axis first."""
    return all(shard_dim(placement) != dim for placement in here[axis + 1 :])


def _local_bytes(placements: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int) -> int:
    """Bytes of the largest shard."""
    local = list(shape)
    for placement, size in zip(placements, axes, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            local[dim] = -(-local[dim] // size)
    return math.prod(local) * element
