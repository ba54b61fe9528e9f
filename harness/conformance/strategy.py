"""Strategies: on which placements an operator needs no data from other ranks, and what may be pending in its results.

Per mesh axis, from the mathematics of the operator alone. Axes are independent: an operator that is local on each is
local on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from harness.conformance.check import PARTIALS, Check, shard_dim

Words = tuple[str, ...]  # one word per input, on one axis

LINEAR = ("Psum", "Pavg")
_UNARY: dict[str, tuple[str, ...]] = {
    "abs": (),
    "reciprocal": (),
    "clamp": ("Pmax", "Pmin"),  # rises with its input
    "clamp.min": ("Pmax", "Pmin"),
    # Rounding to fewer bits does not add up; and nobody can reduce float8.
    "cast.bfloat16": ("Pmax", "Pmin"),
    "cast.e4m3": (),
    "cast.e5m2": (),
    "cast.float32": PARTIALS,
    "cast.float64": PARTIALS,
}
_MOVES = frozenset(
    {"t", "transpose", "view", "reshape", "split", "cat", "redistribute"}
    | {f"f8.{name}" for name in ("t", "transpose", "view", "split", "cat", "clone", "detach", "redistribute")}
)
_SCALED = frozenset({"mul", "div", "mul.scale", "div.scale"})
MATMULS = frozenset({"mm", "f8.mm", "f8.mm.rowwise"})
REDUCTIONS = frozenset({"amax", "amin", "max", "aminmax", "tensor_to_amax"})
SCALES = frozenset({"tensor_to_scale", "tensor_to_scale.pow2", "to_float8"})


def local_words(check: Check, size: int, shapes: Sequence[tuple[int, ...]]) -> frozenset[Words]:
    """All placements of the inputs on an axis of `size` ranks that the operator can work on as they are.

    `shapes` are those of the inputs on that axis: the whole tensor, or its part on the axes to the left.
    """
    alphabets = [words_of(len(shape)) for shape in shapes]
    return frozenset(words for words in product(*alphabets) if _is_local(check, words, size, shapes))


def words_of(ndim: int) -> tuple[str, ...]:
    """All words for a tensor of `ndim` dims."""
    return ("R", *(f"S{dim}" for dim in range(ndim)), *PARTIALS)


def _is_local(check: Check, words: Words, size: int, shapes: Sequence[tuple[int, ...]]) -> bool:
    if all(word == "R" for word in words):
        return True
    if check.op in MATMULS:
        return is_local_matmul(words) or (check.op == "mm" and "R" in words and bool(set(LINEAR) & set(words)))
    if check.op in _SCALED:
        return _is_local_scaling(check.op, words)
    if len(set(words)) > 1:
        return False
    return _is_local_alone(check, words[0], size, shapes[0])


def _is_local_alone(check: Check, word: str, size: int, shape: tuple[int, ...]) -> bool:
    """The same for an operator whose inputs all have the placement `word`."""
    dim = shard_dim(word)
    if check.op in REDUCTIONS:
        return _is_local_reduction(check, word, dim)
    if check.op in _UNARY:
        return dim is not None or word in _UNARY[check.op]
    assert check.op in _MOVES, f"no strategy for {check.op}"
    return word in PARTIALS if dim is None else _moves_freely(check, dim, size, shape)


def is_local_matmul(words: Words) -> bool:
    """Whether the operands of a matmul are replicated or sharded so that each rank multiplies what it has."""
    plain = tuple(word.replace("T", "S") for word in words)
    return plain in {("R", "R"), ("S0", "R"), ("R", "S1"), ("S1", "S0")}


def _is_local_scaling(op: str, words: Words) -> bool:
    left, right = words
    if right == "R":
        return left in LINEAR or (op.endswith(".scale") and shard_dim(left) is not None)
    if left == "R" and right in LINEAR:
        return op.startswith("mul")
    return left == right and shard_dim(left) is not None


def reduced_dims(check: Check) -> tuple[int, ...]:
    """The dims over which the operator reduces, counted from the front; none for one that does not."""
    if check.op not in REDUCTIONS | SCALES:
        return ()
    return tuple(range(len(check.shape))) if check.dim is None else (check.dim % len(check.shape),)


def pending_word(check: Check, output: int) -> str | None:
    """What is pending in an output when a dim that the operator reduces was sharded; None: nothing may be.

    Indices of `max` cannot be reduced, and a scale is no longer monotonic in anything that is pending.
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


def _is_local_reduction(check: Check, word: str, dim: int | None) -> bool:
    if dim is not None:
        whole_needed = check.op == "max" and check.dim is not None
        return not (whole_needed and dim in reduced_dims(check))
    return word == {"amax": "Pmax", "amin": "Pmin"}.get(check.op) or (
        word == "Pmax" and check.op == "max" and check.dim is None
    )


def _moves_freely(check: Check, dim: int, size: int, shape: tuple[int, ...]) -> bool:
    """Whether a tensor sharded over `dim` can be moved as asked, each rank its own piece."""
    if check.op in {"split", "cat", "f8.split", "f8.cat"}:
        return check.dim is not None and dim != check.dim % len(shape)
    if check.op in {"view", "reshape", "f8.view"}:
        return view_dim(check.shape, check.sizes, dim, size) is not None
    return True


def view_dim(shape: Sequence[int], sizes: Sequence[int], dim: int, parts: int) -> int | None:
    """The dim of the view that is cut exactly where `dim` of `shape` was cut into `parts`; None when no dim is.

    That is the one with the same number of elements in front of and behind its first cut.
    """
    for index, length in enumerate(sizes):
        same_front = math.prod(shape[:dim]) == math.prod(sizes[:index])
        if not same_front or length == 1 != shape[dim]:
            continue
        piece = -(-shape[dim] // parts) * math.prod(shape[dim + 1 :])
        if piece == -(-length // parts) * math.prod(sizes[index + 1 :]):
            return index
    return None


def may_be_pending(check: Check, axis: int, output: int, word: str) -> bool:
    """Whether an output may carry the pending reduction `word` on a mesh axis: of an input or its own.

    An operator may cut a replicated input to save work. Whether it makes the right whole is judged by numbers.
    """
    return word == pending_word(check, output) or word in [placements[axis] for placements in check.inputs]
