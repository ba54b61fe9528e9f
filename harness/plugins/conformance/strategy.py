"""What an operator may do on given placements: where it is local, which results may be Partial, what it may cost.

Derived per mesh axis from the mathematics of the operator alone. Local means that no rank needs data of another. Axes
are independent: an operator that is local on every axis is local on the mesh.

The cost is the fewest bytes that a rank must receive. It is searched among all ways to redistribute the inputs, one
mesh axis at a time, until the operator is local, by DTensor's rules:

- uneven shards are padded to the largest before they are sent;
- a partial input that must be reduced is all-reduced. A reduce-scatter moves half as much, but shards a tensor that was
  not sharded: it is an option only where another input or the target is sharded that way;
- a tensor changes its sharded dim by an all-gather, as DTensor does on a CPU (on CUDA: by an all-to-all).
"""

import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from harness.matrix.recipes import ITEM_BYTES
from harness.plugins.conformance.checks import MATMULS, PARTIALS, OperatorCheck, Placements, local_shape, shard_dim

AxisPlacements = tuple[str, ...]  # one placement per input, on one mesh axis

LINEAR = ("Psum", "Pavg")
_UNARY: dict[str, tuple[str, ...]] = {
    "abs": (),
    "reciprocal": (),
    "clamp": ("Pmax", "Pmin"),  # monotonic
    "clamp.min": ("Pmax", "Pmin"),
    # Rounding does not commute with a sum, and no backend reduces float8.
    "cast.bfloat16": ("Pmax", "Pmin"),
    "cast.e4m3": (),
    "cast.e5m2": (),
    "cast.float32": PARTIALS,
    "cast.float64": PARTIALS,
}
_DATA_MOVEMENT = frozenset(
    {"t", "transpose", "view", "reshape", "split", "cat", "redistribute"}
    | {f"f8.{name}" for name in ("t", "transpose", "view", "split", "cat", "clone", "detach", "redistribute")}
)
_CASTS_OF_BLOCKS = frozenset({"mxfp8.rows", "mxfp8.rows.floor", "mxfp8.columns", "mxfp8.columns.floor"})
_SCALED = frozenset({"mul", "div", "mul.scale", "div.scale"})
REDUCTIONS = frozenset({"amax", "amin", "max", "aminmax", "tensor_to_amax"})
_FLOAT8_BYTES = 1
# torchao casts an amax to float64 before it is reduced, so that eager and compiled scales are bit-equal.
_AMAX_BYTES = 8
SCALES = frozenset({"tensor_to_scale", "tensor_to_scale.pow2", "to_float8"})


def local_placements(check: OperatorCheck, size: int, shapes: Sequence[tuple[int, ...]]) -> frozenset[AxisPlacements]:
    """Return all placements of the inputs on an axis of `size` ranks on which the operator is local.

    `shapes` are those of the inputs on that axis: of the whole tensors, or of their shards on the axes to the left.
    """
    choices = [placements_of(len(shape)) for shape in shapes]
    return frozenset(placements for placements in product(*choices) if _is_local(check, placements, size, shapes))


def placements_of(ndim: int) -> tuple[str, ...]:
    """Return all placements of a tensor of `ndim` dims on one axis."""
    return ("R", *(f"S{dim}" for dim in range(ndim)), *PARTIALS)


def _is_local(check: OperatorCheck, placements: AxisPlacements, size: int, shapes: Sequence[tuple[int, ...]]) -> bool:
    if all(placement == "R" for placement in placements):
        return True
    if check.op in MATMULS:
        linear = check.op == "mm" and "R" in placements and not set(LINEAR).isdisjoint(placements)
        return linear or is_local_matmul(placements)
    if check.op in _SCALED:
        return _is_local_scaling(check.op, placements)
    if len(set(placements)) > 1:
        return False
    return _is_local_with_equal_placements(check, placements[0], size, shapes[0])


def _is_local_with_equal_placements(check: OperatorCheck, placement: str, size: int, shape: tuple[int, ...]) -> bool:
    dim = shard_dim(placement)
    if check.op in REDUCTIONS:
        if dim is None:
            return check.op in ("amax", "amin", "max") and placement == own_partial(check, 0)
        needs_indices = check.op == "max" and check.dim is not None
        return not (needs_indices and dim in reduced_dims(check))
    if check.op in _CASTS_OF_BLOCKS:
        return dim is not None  # the shards of all checks have whole blocks
    if check.op in _UNARY:
        return dim is not None or placement in _UNARY[check.op]
    assert check.op in _DATA_MOVEMENT, f"no strategy for {check.op}"
    return placement in PARTIALS if dim is None else _moves_locally(check, dim, size, shape)


def is_local_matmul(placements: AxisPlacements) -> bool:
    """Return whether a matmul of operands that are replicated or sharded like this is local."""
    plain = tuple(placement.replace("T", "S") for placement in placements)
    return plain in {("R", "R"), ("S0", "R"), ("R", "S1"), ("S1", "S0")}


def _is_local_scaling(op: str, placements: AxisPlacements) -> bool:
    left, right = placements
    if right == "R":
        return left in LINEAR or (op.endswith(".scale") and shard_dim(left) is not None)
    if left == "R" and right in LINEAR:
        return op.startswith("mul")
    return left == right and shard_dim(left) is not None


def reduced_dims(check: OperatorCheck) -> tuple[int, ...]:
    """Return the dims that the operator reduces, as non-negative numbers; empty for other operators."""
    if check.op not in REDUCTIONS | SCALES:
        return ()
    return tuple(range(len(check.shape))) if check.dim is None else (check.dim % len(check.shape),)


def own_partial(check: OperatorCheck, output: int) -> str | None:
    """Return the Partial placement of an output after the operator reduced a sharded dim; None if it must not.

    Indices of `max` cannot be reduced, and a scale needs the reduced amax.
    """
    if check.op in MATMULS:
        return "Psum"
    return {
        "amax": "Pmax",
        "amin": "Pmin",
        "max": "Pmax" if check.dim is None else None,
        "aminmax": ("Pmin", "Pmax")[output % 2],
        "tensor_to_amax": "Pmax",
    }.get(check.op)


def _moves_locally(check: OperatorCheck, dim: int, size: int, shape: tuple[int, ...]) -> bool:
    """Return whether every rank can do its part of the data movement on its own shard over `dim`."""
    if check.op in {"split", "cat", "f8.split", "f8.cat"}:
        return check.dim is not None and dim != check.dim % len(shape)
    if check.op in {"view", "reshape", "f8.view"}:
        return view_dim(check.shape, check.sizes, dim, size) is not None
    return True


def view_dim(shape: Sequence[int], sizes: Sequence[int], dim: int, parts: int) -> int | None:
    """Return the dim of the view that is sharded the way `dim` of `shape` is, into `parts`, or None.

    It has the same number of elements in front of it and in its first shard.
    """
    for index, length in enumerate(sizes):
        same_front = math.prod(shape[:dim]) == math.prod(sizes[:index])
        if not same_front or length == 1 != shape[dim]:
            continue
        elements = -(-shape[dim] // parts) * math.prod(shape[dim + 1 :])
        if elements == -(-length // parts) * math.prod(sizes[index + 1 :]):
            return index
    return None


def may_be_partial(check: OperatorCheck, axis: int, output: int, placement: str) -> bool:
    """Return whether an output may have this Partial placement on a mesh axis: an input's, or its own.

    An operator may shard a replicated input to save work; whether the whole result is right is checked by its values.
    """
    return placement == own_partial(check, output) or placement in [placements[axis] for placements in check.inputs]


def cheapest_bytes(check: OperatorCheck) -> float:
    """Return the budget of a check: the bytes that one rank may receive."""
    shapes = _input_shapes(check)
    # strided shards as plain shards: their contents differ, their sizes do not
    inputs = [tuple(placement.replace("T", "S") for placement in placements) for placements in check.inputs]
    layouts = [*inputs, *([check.target] if check.target else [])]
    wanted = tuple(frozenset(axis) for axis in zip(*layouts, strict=True))
    element = _FLOAT8_BYTES if check.op.startswith("f8.") else ITEM_BYTES[check.dtype]
    paths = [
        _paths(placements, shape, check.axes, element, wanted) for placements, shape in zip(inputs, shapes, strict=True)
    ]
    if check.target:
        return paths[0][check.target]
    if check.op in SCALES:
        reduced = tuple("R" if placement in PARTIALS else placement for placement in inputs[0])
        return paths[0][reduced] + _amax_bytes(check, reduced, inputs[0])
    local = product(*(local_placements(check, size, shapes) for size in check.axes))
    return min(
        sum(path.get(target, math.inf) for path, target in zip(paths, zip(*by_axis, strict=True), strict=True))
        for by_axis in local
    )


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
    """Return the bytes to reach every placement from `source`, by Dijkstra's algorithm.

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
    """Yield all gathers and reductions over one axis, with the bytes that a rank receives."""
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
    """Gather a dim that several axes shard from the rightmost axis first."""
    return all(shard_dim(placement) != dim for placement in here[axis + 1 :])


def _local_bytes(placements: Placements, shape: tuple[int, ...], axes: tuple[int, ...], element: int) -> int:
    return math.prod(local_shape(shape, placements, axes, (0,) * len(axes))) * element
