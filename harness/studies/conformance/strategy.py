"""Sharding strategies: on which placements an operator is local, and which results may be Partial.

Derived per mesh axis from the mathematics of the operator alone. Local means that no rank needs data of another. Axes
are independent: an operator that is local on every axis is local on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from harness.trace.operator_checks import PARTIALS, OperatorCheck, shard_dim

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
_SCALED = frozenset({"mul", "div", "mul.scale", "div.scale"})
MATMULS = frozenset({"mm", "f8.mm", "f8.mm.rowwise"})
REDUCTIONS = frozenset({"amax", "amin", "max", "aminmax", "tensor_to_amax"})
SCALES = frozenset({"tensor_to_scale", "tensor_to_scale.pow2", "to_float8"})


def local_placements(check: OperatorCheck, size: int, shapes: Sequence[tuple[int, ...]]) -> frozenset[AxisPlacements]:
    """All placements of the inputs on an axis of `size` ranks on which the operator is local.

    `shapes` are those of the inputs on that axis: of the whole tensors, or of their shards on the axes to the left.
    """
    choices = [placements_of(len(shape)) for shape in shapes]
    return frozenset(placements for placements in product(*choices) if _is_local(check, placements, size, shapes))


def placements_of(ndim: int) -> tuple[str, ...]:
    """All placements of a tensor of `ndim` dims on one axis."""
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
    """Whether an operator whose inputs all have this placement is local."""
    dim = shard_dim(placement)
    if check.op in REDUCTIONS:
        return _is_local_reduction(check, placement, dim)
    if check.op in _UNARY:
        return dim is not None or placement in _UNARY[check.op]
    assert check.op in _DATA_MOVEMENT, f"no strategy for {check.op}"
    return placement in PARTIALS if dim is None else _moves_locally(check, dim, size, shape)


def is_local_matmul(placements: AxisPlacements) -> bool:
    """Whether a matmul of operands that are replicated or sharded like this is local."""
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
    """The dims that the operator reduces, as non-negative numbers; empty for other operators."""
    if check.op not in REDUCTIONS | SCALES:
        return ()
    return tuple(range(len(check.shape))) if check.dim is None else (check.dim % len(check.shape),)


def own_partial(check: OperatorCheck, output: int) -> str | None:
    """The Partial placement of an output after the operator reduced a sharded dim; None if it must not be Partial.

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


def _is_local_reduction(check: OperatorCheck, placement: str, dim: int | None) -> bool:
    if dim is not None:
        needs_indices = check.op == "max" and check.dim is not None
        return not (needs_indices and dim in reduced_dims(check))
    return placement == {"amax": "Pmax", "amin": "Pmin"}.get(check.op) or (
        placement == "Pmax" and check.op == "max" and check.dim is None
    )


def _moves_locally(check: OperatorCheck, dim: int, size: int, shape: tuple[int, ...]) -> bool:
    """Whether every rank can do its part of the data movement on its own shard over `dim`."""
    if check.op in {"split", "cat", "f8.split", "f8.cat"}:
        return check.dim is not None and dim != check.dim % len(shape)
    if check.op in {"view", "reshape", "f8.view"}:
        return view_dim(check.shape, check.sizes, dim, size) is not None
    return True


def view_dim(shape: Sequence[int], sizes: Sequence[int], dim: int, parts: int) -> int | None:
    """The dim of the view that is sharded the way `dim` of `shape` is, into `parts`; None if there is none.

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
    """Whether an output may have this Partial placement on a mesh axis: that of an input, or its own.

    An operator may shard a replicated input to save work; whether the whole result is right is judged by its values.
    """
    return placement == own_partial(check, output) or placement in [placements[axis] for placements in check.inputs]
