"""Cost: the fewest bytes a rank can receive when an operator runs on given placements.

A search over all ways to redistribute the inputs, one mesh axis at a time, until the operator is local. What DTensor
does by rule is part of it:

- pieces of unequal size travel padded to the largest;
- a pending reduction that has to be done is done on every rank (all-reduce). A reduce-scatter moves half, but shards a
  tensor that nobody sharded; it counts where another input or the target is sharded that way;
- a tensor changes the dim it is sharded over by an all-gather, as DTensor does on a CPU (on CUDA: by an all-to-all).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Mapping
from itertools import product

from harness.conformance.check import PARTIALS, Check, Placements, shard_dim
from harness.conformance.strategy import local_words, reduced_dims, words_of

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_FLOAT8_BYTES = 1
# torchao casts an amax to float64 before anything reduces it, so that eager and compiled scales are the same bits.
_AMAX_BYTES = 8


def cheapest_bytes(check: Check) -> float:
    """The budget of a check in bytes received by one rank."""
    shapes = input_shapes(check)
    inputs = [_unstrided(placements) for placements in check.inputs]
    wanted = tuple(frozenset(words) for words in zip(*inputs, *([check.target] if check.target else []), strict=True))
    paths = [
        _paths(placements, shape, check.axes, element_bytes(check), wanted)
        for placements, shape in zip(inputs, shapes, strict=True)
    ]
    if check.target:
        return paths[0][check.target]
    if _makes_scales(check):
        reduced = tuple("R" if word in PARTIALS else word for word in inputs[0])
        return paths[0][reduced] + _amax_bytes(check, reduced)
    best = float("inf")
    for by_axis in product(*(local_words(check, size, shapes) for size in check.axes)):
        targets = zip(*by_axis, strict=True)
        best = min(best, sum(path.get(target, float("inf")) for path, target in zip(paths, targets, strict=True)))
    return best


def _unstrided(placements: Placements) -> Placements:
    """`T` words as `S` words: the pieces are others, their sizes are not."""
    return tuple(word.replace("T", "S") for word in placements)


def element_bytes(check: Check) -> int:
    """Bytes of an element of the inputs as they travel."""
    return _FLOAT8_BYTES if check.op.startswith("f8.") else ELEMENT_BYTES[check.dtype]


def input_shapes(check: Check) -> list[tuple[int, ...]]:
    """Shapes of all inputs of a check."""
    if check.op in ("mm", "f8.mm", "f8.mm.rowwise"):
        return [check.shape, (check.shape[1], check.sizes[0])]
    if check.op.endswith(".scale"):
        return [check.shape, ()]
    return [check.shape] * len(check.inputs)


def _makes_scales(check: Check) -> bool:
    return check.op.startswith(("tensor_to_scale", "to_float8"))


def _amax_bytes(check: Check, words: Placements) -> float:
    """What the reduction of the amax costs where a scale needs it whole: one element, or one per row or column."""
    dims = reduced_dims(check)
    kept = tuple(1 if dim in dims else length for dim, length in enumerate(check.shape))
    others = tuple("R" if shard_dim(word) in dims else word for word in words)
    held = _local_bytes(others, kept, check.axes, _AMAX_BYTES)
    sizes = [size for word, size in zip(words, check.axes, strict=True) if shard_dim(word) in dims]
    return sum(2 * (size - 1) / size * held for size in sizes)


@functools.cache
def _paths(
    source: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int, wanted: tuple[frozenset[str], ...]
) -> Mapping[Placements, float]:
    """Bytes to every placement that can be reached from `source`, by Dijkstra's search.

    Sharding what is replicated is free and comes last: it must not make an earlier reduction cheaper.
    """
    known: dict[Placements, float] = {}
    queue = [(0.0, source)]
    while queue:
        price, here = heapq.heappop(queue)
        if here not in known:
            known[here] = price
            for step, there in _steps(here, shape, axes, element, wanted):
                heapq.heappush(queue, (price + step, there))
    reached = dict(known)
    for here, price in sorted(known.items(), key=lambda item: item[1]):
        for there in _cuts(here, source, wanted, len(shape)):
            reached[there] = min(price, reached.get(there, float("inf")))
    return reached


def _cuts(here: Placements, source: Placements, wanted: tuple[frozenset[str], ...], ndim: int) -> Iterator[Placements]:
    """What replicated axes can become without data: anything if they were replicated before, else what is wanted."""
    options = [
        (now,) if now != "R" else words_of(ndim) if before == "R" else {"R", *asked}
        for now, before, asked in zip(here, source, wanted, strict=True)
    ]
    for there in product(*options):
        cut = [axis for axis in range(len(here)) if there[axis] != here[axis]]
        if all(_is_innermost(here, axis, dim) for axis in cut if (dim := shard_dim(there[axis])) is not None):
            yield there


def _steps(
    here: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int, wanted: tuple[frozenset[str], ...]
) -> Iterator[tuple[float, Placements]]:
    """Every gather and reduction over one axis, with what a rank receives for it."""
    held = _local_bytes(here, shape, axes, element)
    for axis, word in enumerate(here):
        size, dim = axes[axis], shard_dim(word)
        if word == "R" or (dim is not None and not _is_innermost(here, axis, dim)):
            continue
        if dim is not None:
            yield (size - 1) * held, _changed(here, axis, "R")
            continue
        yield 2 * (size - 1) / size * held, _changed(here, axis, "R")
        for new in wanted[axis]:
            new_dim = shard_dim(new)
            if new_dim is not None and new_dim < len(shape) and _is_innermost(here, axis, new_dim):
                there = _changed(here, axis, new)
                yield (size - 1) * _local_bytes(there, shape, axes, element), there


def _changed(here: Placements, axis: int, word: str) -> Placements:
    return (*here[:axis], word, *here[axis + 1 :])


def _is_innermost(here: Placements, axis: int, dim: int) -> bool:
    """A dim that several axes shard is put together from the right."""
    return all(shard_dim(word) != dim for word in here[axis + 1 :])


def _local_bytes(placements: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int) -> int:
    """Bytes of the largest piece."""
    local = list(shape)
    for word, size in zip(placements, axes, strict=True):
        dim = shard_dim(word)
        if dim is not None:
            local[dim] = -(-local[dim] // size)
    return math.prod(local) * element
