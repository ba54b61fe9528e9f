"""Known deviations: where the torch and torchao that were looked at are not what this project asks of them.

A deviation says which checks it hits and what their problem looks like; it excuses no problem that looks different.
Found with torch 2.13.0 and torchao 0.18.0. "unreported": no report was known when it was written down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from harness.conformance.check import Check, Placements, local_shape, shard_dim
from harness.conformance.strategy import LINEAR, is_local_matmul, reduced_dims, view_dim

UNREPORTED = "unreported"
CASTS = "https://github.com/pytorch/pytorch/pull/172696"  # reduces first where the target is an integer, and only there


class Deviation(NamedTuple):
    """One record. `pattern` is searched in what was found of a problem of one of `kinds`.

    With `always` a check that it hits must show it: one that passes says that the record is out of date.
    """

    name: str
    hits: Callable[[Check], bool]
    kinds: tuple[str, ...]
    pattern: str
    reason: str
    link: str
    always: bool = True


def deviations_of(check: Check) -> tuple[Deviation, ...]:
    """The records that hit a check."""
    return tuple(deviation for deviation in KNOWN if deviation.hits(check))


def explains(deviation: Deviation, kind: str, found: str) -> bool:
    """Whether a problem of this kind looks as recorded."""
    return kind in deviation.kinds and re.search(deviation.pattern, found) is not None


def _words(check: Check, index: int = 0) -> Placements:
    return check.inputs[index] if index < len(check.inputs) else ()


def _pending(check: Check, *words: str) -> bool:
    """Whether some input has one of these pending reductions; without words, any."""
    return any(word[0] == "P" and (not words or word in words) for placements in check.inputs for word in placements)


def _shards(check: Check) -> list[tuple[int, int]]:
    """(dim, size of the mesh axis) of every shard of the first input."""
    pairs = [(shard_dim(word), size) for word, size in zip(_words(check), check.axes, strict=True)]
    return [(dim, size) for dim, size in pairs if dim is not None]


def _cuts(check: Check, placements: Placements) -> dict[int, int]:
    """How many pieces every sharded dim is cut into, over all axes."""
    cuts: dict[int, int] = {}
    for word, size in zip(placements, check.axes, strict=True):
        dim = shard_dim(word)
        if dim is not None:
            cuts[dim] = cuts.get(dim, 1) * size
    return cuts


def _empty_dims(check: Check, placements: Placements) -> set[int]:
    """Dims of the first input of which some rank holds nothing."""
    ranks = product(*(range(size) for size in check.axes))
    shapes = [local_shape(check.shape, placements, check.axes, coordinates) for coordinates in ranks]
    return {dim for shape in shapes for dim, length in enumerate(shape) if not length}


def _empty_reduced(check: Check) -> bool:
    """Some rank has nothing of a reduced dim. max with a dim gathers it, as aminmax does a dim that is short."""
    if check.op == "max" and check.dim is not None:
        return False
    cuts = _cuts(check, _words(check))
    empty = _empty_dims(check, _words(check)) & set(reduced_dims(check))
    return any(check.op != "aminmax" or check.shape[dim] >= cuts[dim] for dim in empty)


def _shorter_than_axis(check: Check) -> bool:
    """A dim that stays sharded has fewer elements than there are ranks."""
    shapes = [check.shape, (check.shape[-1], *check.sizes)] if check.op == "mm" else [check.shape] * 2
    return any(
        shape[dim] < count and not (check.op == "max" and dim in reduced_dims(check))
        for placements, shape in zip(check.inputs, shapes, strict=False)
        for dim, count in _cuts(check, placements).items()
    )


def _uneven(check: Check, placements: Placements) -> bool:
    return any(check.shape[dim] % count for dim, count in _cuts(check, placements).items())


def _may_pad(check: Check) -> bool:
    """An uneven tensor has to be moved from one layout to another, or reduced to pieces."""
    layouts = [*check.inputs, *([check.target] if check.target else [])]
    uneven = any(_uneven(check, words) for words in layouts)
    moves = check.op in {"redistribute", "mul", "div"} or (check.op == "max" and check.dim is not None)
    return (moves and (uneven or _pending(check))) or (uneven and _pending(check))


def _differently_sharded(check: Check) -> bool:
    """Two operands on two axes, both sharded, not in the same way."""
    left, right = _words(check), _words(check, 1)
    return len(check.axes) > 1 and bool(right) and left != right and bool(_cuts(check, left) and _cuts(check, right))


def _scattered_scale(check: Check) -> bool:
    """Rowwise on two axes: DTensor may reduce-scatter the pending amax of one axis over what the other axis shards."""
    words = _words(check)
    return check.op == "to_float8" and check.dim is not None and len(words) == 2 and _scatters(check, words)


def _scatters(check: Check, words: Placements) -> bool:
    reduced = check.dim % len(check.shape) if check.dim is not None else -1
    if words == ("S0", "S1"):
        return reduced == 1
    return reduced == 0 and words in {("Psum", "S0"), ("S1", "Psum")}


def _float8_needs_data(check: Check) -> bool:
    """A float8 operator whose input has to be gathered over another dim than the first, or with rowwise scales."""
    if check.op in ("f8.split", "f8.cat"):
        return any(dim == check.dim != 0 for dim, _ in _shards(check))
    if check.op not in ("f8.mm", "f8.mm.rowwise"):
        return False
    combinations = [words for words in zip(*check.inputs, strict=True) if not is_local_matmul(words)]
    return any(check.op == "f8.mm.rowwise" or words != ("S0", "S1") for words in combinations)


def _cut_by_view(check: Check) -> bool:
    """The first of several dims that a view joins or splits is sharded unevenly."""
    if check.op not in {"view", "reshape", "f8.view"}:
        return False
    fronts = [math.prod(check.sizes[:index]) for index in range(len(check.sizes))]
    return any(
        check.shape[dim] % size
        and math.prod(check.shape[:dim]) in fronts
        and view_dim(check.shape, check.sizes, dim, size) is None
        for dim, size in _shards(check)
    )


KNOWN: tuple[Deviation, ...] = (
    Deviation(
        name="reduction-of-empty-shard",
        hits=_empty_reduced,
        kinds=("raised",),
        pattern=r"(amax|amin|max|aminmax)(\(\))?:? .*(Expected reduction dim|empty dimension)",
        reason="A rank that holds nothing of the reduced dim reduces an empty tensor, which has no identity.",
        link="https://github.com/pytorch/ao/issues/1938",
    ),
    Deviation(
        name="short-dim-is-gathered",
        hits=lambda check: (
            check.op in {"max", "aminmax", "mul", "div", "mm"}
            and not (check.op == "max" and check.dim is None)
            and _shorter_than_axis(check)
        ),
        kinds=("bytes",),
        pattern="all_gather",
        reason="A dim with fewer elements than ranks counts as not shardable, so a local operator gathers it.",
        link=UNREPORTED,
    ),
    Deviation(
        name="cast-before-reduction",
        hits=lambda check: check.op == "cast.bfloat16" and check.dtype == "float32" and _pending(check, *LINEAR),
        kinds=("wrong",),
        pattern="elements differ",
        reason="A cast keeps a pending sum, so every part is rounded before the sum instead of the sum once after it.",
        link=CASTS,
    ),
    Deviation(
        name="float8-cast-keeps-pending",
        hits=lambda check: check.op in {"cast.e4m3", "cast.e5m2"} and _pending(check),
        kinds=("raised",),
        pattern="cannot be reduced",
        reason="A cast to float8 keeps a pending reduction, which no backend can do in float8.",
        link=CASTS,
    ),
    Deviation(
        name="clamp-reduces-pending-maximum",
        hits=lambda check: check.op in {"clamp", "clamp.min"} and _pending(check, "Pmax", "Pmin"),
        kinds=("bytes",),
        pattern="all_reduce|reduce_scatter",
        reason="clamp rises with its input and could keep a pending maximum or minimum; it is reduced first.",
        link=UNREPORTED,
    ),
    Deviation(
        name="pending-input-reduced-twice",
        hits=lambda check: check.op == "to_float8" and _pending(check) and not _shards(check),
        kinds=("bytes",),
        pattern=r"(all_reduce|reduce_scatter).*(all_reduce|reduce_scatter)",
        reason="hp_tensor_to_float8_dynamic reduces a pending input once for its amax and once more for the cast.",
        link=UNREPORTED,
    ),
    Deviation(
        name="pending-axis-reduced-twice",
        hits=lambda check: check.op == "to_float8" and _pending(check) and bool(_shards(check)),
        kinds=("bytes",),
        pattern=r"(all_reduce|reduce_scatter).*(all_reduce|reduce_scatter)",
        reason="The same beside a sharded axis. It may cost no more: DTensor picks reduce-scatter or all-reduce.",
        link=UNREPORTED,
        always=False,
    ),
    Deviation(
        name="rowwise-scale-not-placed-as-its-tensor",
        hits=_scattered_scale,
        kinds=("raised", "wrong"),
        pattern=r"The size of tensor a|elements differ",
        reason="On two axes the rowwise scale is reduce-scattered to other placements than the data, and "
        "hp_tensor_and_scale_to_float8 pairs the local pieces of both without looking.",
        link=UNREPORTED,
    ),
    Deviation(
        name="rowwise-scale-may-be-scattered",
        hits=lambda check: (
            check.op.startswith(("to_float8", "tensor_to_scale")) and check.dim is not None and len(check.axes) > 1
        ),
        kinds=("raised", "wrong", "bytes"),
        pattern=r"The size of tensor a|elements differ|reduce_scatter|all_gather.*all_reduce",
        reason="The same for other layouts of two axes, or with a detour by a gather; it depends on the sizes.",
        link=UNREPORTED,
        always=False,
    ),
    Deviation(
        name="amax-gathers-beside-pending-axis",
        hits=lambda check: (
            check.op in {"amax", "amin", "max"}
            and not (check.op == "max" and check.dim is not None)
            and _pending(check)
            and any(dim in reduced_dims(check) for dim, _ in _shards(check))
        ),
        kinds=("bytes",),
        pattern="all_gather",
        reason="With a reduction pending on one axis, the reduced dim is gathered on the other one.",
        link=UNREPORTED,
    ),
    Deviation(
        name="scale-pending-gathers-tensor",
        hits=lambda check: check.op == "mul.scale" and _words(check, 1) == ("Psum",) and bool(_shards(check)),
        kinds=("bytes",),
        pattern="all_gather",
        reason="A sharded tensor times a scalar with a pending sum gathers the tensor instead of reducing the scalar.",
        link=UNREPORTED,
    ),
    Deviation(
        name="cat-of-pending-and-sharded",
        hits=lambda check: (
            check.op == "cat"
            and check.inputs[0] != check.inputs[1]
            and _pending(check)
            and any(shard_dim(word) == check.dim for placements in check.inputs for word in placements)
        ),
        kinds=("bytes",),
        pattern="all_reduce.*all_gather|all_gather.*all_reduce",
        reason="cat of a pending sum and a shard of its dim makes both whole; gathering the shard would do.",
        link=UNREPORTED,
    ),
    Deviation(
        name="flatten-of-uneven-shard",
        hits=_cut_by_view,
        kinds=("raised",),
        pattern="Cannot (flatten|unflatten) unevenly sharded",
        reason="DTensor refuses to flatten or unflatten an unevenly sharded dim, instead of gathering it.",
        link=UNREPORTED,
    ),
    Deviation(
        name="uneven-reshard-pads-both-dims",
        hits=lambda check: (
            check.op == "redistribute"
            and len(check.axes) == 1
            and not _pending(check)
            and check.inputs[0] != ("R",)
            and check.target != ("R",)
            and (_uneven(check, check.inputs[0]) or _uneven(check, check.target))
        ),
        kinds=("bytes",),
        pattern="all_gather",
        reason="To change the sharded dim both dims are padded before the gather that stands for an all-to-all.",
        link=UNREPORTED,
    ),
    Deviation(
        name="dearer-operand-moves",
        hits=_differently_sharded,
        kinds=("bytes",),
        pattern="all_gather",
        reason="Of two operands the one that costs more bytes may be moved: DTensor's cost has a latency per step too.",
        link=UNREPORTED,
        always=False,
    ),
    Deviation(
        name="uneven-move-pads",
        hits=_may_pad,
        kinds=("bytes",),
        pattern="all_gather|reduce_scatter",
        reason="Between layouts of unequal pieces every cut dim is padded to a multiple of its ranks before it moves.",
        link=UNREPORTED,
        always=False,
    ),
    Deviation(
        name="redistribution-gathers-before-it-reduces",
        hits=lambda check: (
            check.op == "redistribute" and check.inputs[0] == ("Psum", "S0") and check.target == ("R", "R")
        ),
        kinds=("bytes",),
        pattern="all_gather.*all_reduce",
        reason="Axes are redistributed from the right: the shard is gathered first, and then all of it is reduced.",
        link=UNREPORTED,
    ),
    Deviation(
        name="float8-uneven-redistribution",
        hits=lambda check: (
            check.op == "f8.redistribute"
            and (_uneven(check, check.inputs[0]) or bool(_empty_dims(check, check.target)))
        ),
        kinds=("missing",),
        pattern=r"aten\.(constant_pad_nd|new_zeros)\.default",
        reason="Float8TrainingTensor cannot be padded, so uneven shards cannot be redistributed.",
        link="https://github.com/pytorch/ao/issues/1938",
    ),
    Deviation(
        name="float8-cannot-be-made-whole",
        hits=_float8_needs_data,
        kinds=("missing",),
        pattern=r"aten\.(chunk|contiguous)\.default|with axiswise scaling is not supported",
        reason="Float8TrainingTensor has no chunk and no contiguous, which a gather over another dim than the first "
        "needs, and cannot be gathered with rowwise scales.",
        link=UNREPORTED,
    ),
)
