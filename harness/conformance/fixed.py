"""The fixed list: the checks that always run. Small tensors, every kind of placement, every operator of FP8."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from harness.conformance.check import PARTIALS, Check, Dtype, Mesh, Placements

EVEN, UNEVEN, EMPTY, CUBE = (8, 16), (7, 10), (3, 5), (4, 8, 6)

# Two axes: FSDP and TP over different dims, over the same one in both orders, HSDP, and pending reductions.
SQUARE: tuple[Placements, ...] = (
    ("S0", "S1"),
    ("S0", "S0"),
    ("T0", "S0"),
    ("R", "S0"),
    ("S1", "R"),
    ("Psum", "S0"),
    ("S1", "Psum"),
    ("Psum", "R"),
    ("Psum", "Psum"),
)

# operator, dim, keepdim
REDUCTIONS: tuple[tuple[str, int | None, bool], ...] = (
    ("amax", None, False),
    ("amax", 0, False),
    ("amax", 0, True),
    ("amax", -1, False),
    ("amax", -1, True),
    ("amin", -1, True),
    ("max", None, False),
    ("max", 0, False),
    ("max", -1, True),
    ("aminmax", None, False),
    ("aminmax", -1, True),
)
POINTWISE = (
    "abs",
    "clamp",
    "clamp.min",
    "reciprocal",
    "cast.bfloat16",
    "cast.float64",
    "cast.e4m3",
    "cast.e5m2",
)
SCALING: tuple[tuple[str, int | None, bool], ...] = tuple(
    (operator, dim, False)
    for operator in ("tensor_to_amax", "tensor_to_scale", "tensor_to_scale.pow2", "to_float8")
    for dim in (None, -1, 0)
)


def fixed_checks() -> tuple[Check, ...]:
    """Every check of the fixed list, in order; ids are unique."""
    return (
        *_unary_checks(),
        *_binary_checks(),
        *_view_checks(),
        *_turn_checks(),
        *_piece_checks(),
        *_matmul_checks(),
        *_redistributions(),
    )


def _unary_checks() -> Iterator[Check]:
    whole: list[tuple[str, int | None, bool]] = [(name, None, False) for name in POINTWISE]
    for op, dim, keepdim in (*whole, *REDUCTIONS, *SCALING):
        for mesh, shape, dtype, words in _grid():
            yield Check(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(words,), dim=dim, keepdim=keepdim)
    for mesh, shape, dtype, words in _grid():
        if dtype == "bfloat16":
            yield Check(op="cast.float32", shape=shape, mesh=mesh, dtype=dtype, inputs=(words,))


def _grid() -> Iterator[tuple[Mesh, tuple[int, ...], Dtype, Placements]]:
    """Mesh, shape, dtype and placements that every operator of one input meets."""
    for word in ("R", "S0", "S1", *PARTIALS):
        yield "m4", EVEN, "float32", (word,)
    for word in ("S0", "S1", "Psum"):
        yield "m4", EVEN, "bfloat16", (word,)
        yield "m4", UNEVEN, "float32", (word,)
        yield "m2", EVEN, "float32", (word,)
    for word in ("S0", "S1"):
        yield "m4", EMPTY, "float32", (word,)
    for word in ("S0", "S1", "S2"):
        yield "m4", CUBE, "float32", (word,)
    for words in SQUARE:
        yield "m2x2", EVEN, "float32", words
    for words in SQUARE[:2]:
        yield "m2x2", UNEVEN, "float32", words


def _binary_checks() -> Iterator[Check]:
    same = ("R", "S0", "S1", "Psum")
    for op in ("mul", "div"):
        for left in same:
            for right in same:
                yield Check(op=op, shape=EVEN, mesh="m4", inputs=((left,), (right,)))
        yield Check(op=op, shape=UNEVEN, mesh="m4", inputs=(("S0",), ("S0",)))
        yield Check(op=op, shape=EMPTY, mesh="m4", inputs=(("S0",), ("R",)))
        for words in SQUARE:
            yield Check(op=op, shape=EVEN, mesh="m2x2", inputs=(words, ("R", "R")))
    for op in ("mul.scale", "div.scale"):
        for mesh, shape, dtype, words in _grid():
            yield Check(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(words, ("R",) * len(words)))
        for left in ("R", "S0", "Psum"):
            for right in ("Pmax", "Psum"):
                yield Check(op=op, shape=EVEN, mesh="m4", inputs=((left,), (right,)))


_VIEWS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((4, 8, 6), (32, 6)),
    ((4, 8, 6), (4, 48)),
    ((32, 6), (4, 8, 6)),
    ((8, 16), (8, 4, 4)),
    ((8, 16), (8, 16)),
    ((8, 16), (1, 8, 16)),
)


def _view_checks() -> Iterator[Check]:
    for op in ("view", "reshape", "f8.view"):
        for shape, sizes in _VIEWS:
            shards = [f"S{dim}" for dim in range(len(shape))]
            for word in ("R", *shards, *(("Psum", "Pmax") if op != "f8.view" else ())):
                yield Check(op=op, shape=shape, mesh="m4", inputs=((word,),), sizes=sizes)
        yield Check(op=op, shape=(4, 8, 6), mesh="m2x2", inputs=(("S0", "S1"),), sizes=(32, 6))
        yield Check(op=op, shape=(4, 8, 6), mesh="m2x2", inputs=(("S0", "S2"),), sizes=(32, 6))
        yield Check(op=op, shape=(5, 2, 6), mesh="m4", inputs=(("S0",),), sizes=(10, 6))


def _turn_checks() -> Iterator[Check]:
    for op in ("t", "transpose", "f8.t", "f8.transpose"):
        for mesh, shape, dtype, words in _grid():
            pending = any(word[0] == "P" for word in words)
            if (len(shape) == 2 or op == "transpose") and not (pending and op.startswith("f8.")):
                yield Check(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(words,))
    for op in ("f8.clone", "f8.detach"):
        for words in (("R",), ("S0",), ("S1",)):
            for shape in (EVEN, UNEVEN, EMPTY):
                yield Check(op=op, shape=shape, mesh="m4", inputs=(words,))


def _piece_checks() -> Iterator[Check]:
    """Cat and split, over the sharded dim and over the other one."""
    for dim in (0, 1):
        for word in ("R", "S0", "S1", "Psum", "Pmax"):
            for shape in (EVEN, UNEVEN):
                yield Check(op="cat", shape=shape, mesh="m4", inputs=((word,), (word,)), dim=dim)
                yield Check(op="split", shape=shape, mesh="m4", inputs=((word,),), dim=dim, sizes=(4,))
        for left, right in (("S0", "R"), ("S0", "S1"), ("Psum", "R"), ("Psum", "S0")):
            yield Check(op="cat", shape=EVEN, mesh="m4", inputs=((left,), (right,)), dim=dim)
        for op in ("f8.split", "f8.cat"):
            for word in ("R", "S0", "S1"):
                yield Check(op=op, shape=EVEN, mesh="m4", inputs=((word,),), dim=dim, sizes=(4,))
        for words in SQUARE[:5]:
            yield Check(op="split", shape=EVEN, mesh="m2x2", inputs=(words,), dim=dim, sizes=(4,))


def _matmul_checks() -> Iterator[Check]:
    for left in ("R", "S0", "S1", "Psum"):
        for right in ("R", "S0", "S1", "Psum"):
            for dtype in ("float32", "bfloat16"):
                yield _matmul("mm", (8, 16), 12, "m4", dtype, ((left,), (right,)))
            if "Psum" not in (left, right):
                for op in ("f8.mm", "f8.mm.rowwise"):
                    yield _matmul(op, (16, 64), 64, "m4", "float32", ((left,), (right,)))
                    yield _matmul(op, (32, 64), 128, "m2", "bfloat16", ((left,), (right,)))
    for left, right in (("S0", "R"), ("R", "S1"), ("S1", "S0")):
        inputs = ((left,), (right,))
        yield _matmul("mm", (7, 10), 5, "m4", "float32", inputs)
        yield _matmul("mm", (3, 5), 2, "m4", "float32", inputs)
    squares: tuple[tuple[Placements, Placements], ...] = (
        (("S0", "R"), ("R", "S1")),
        (("S0", "S1"), ("R", "S0")),
        (("R", "R"), ("S1", "S1")),
        (("R", "R"), ("T1", "S1")),
        (("T0", "S0"), ("R", "R")),
        (("Psum", "S0"), ("R", "R")),
    )
    for square in squares:
        yield _matmul("mm", (8, 16), 12, "m2x2", "float32", square)
    for square in squares[:5]:
        yield _matmul("f8.mm", (16, 64), 64, "m2x2", "float32", square)
        yield _matmul("f8.mm.rowwise", (16, 64), 64, "m2x2", "float32", square)


def _matmul(
    op: str, shape: tuple[int, int], width: int, mesh: Mesh, dtype: Dtype, inputs: tuple[Placements, Placements]
) -> Check:
    return Check(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=inputs, sizes=(width,))


def _redistributions() -> Iterator[Check]:
    shards = ("R", "S0", "S1")
    for shape in (EVEN, UNEVEN, EMPTY):
        for source in (*shards, *PARTIALS):
            for target in shards:
                if source != target:
                    yield _redistribution("redistribute", shape, "m4", (source,), (target,))
                    if source in shards:
                        yield _redistribution("f8.redistribute", shape, "m4", (source,), (target,))
    for words in SQUARE:
        yield _redistribution("redistribute", EVEN, "m2x2", words, ("R", "R"))
        if "P" not in "".join(words):
            yield _redistribution("f8.redistribute", EVEN, "m2x2", words, ("R", "R"))
    for source_2d, target_2d in ((("S0", "S1"), ("S1", "S0")), (("S0", "R"), ("R", "S0")), (("R", "S0"), ("S0", "S0"))):
        for op in ("redistribute", "f8.redistribute"):
            yield _redistribution(op, EVEN, "m2x2", source_2d, target_2d)


def _redistribution(op: str, shape: tuple[int, ...], mesh: Mesh, source: Placements, target: Placements) -> Check:
    return Check(op=op, shape=shape, mesh=mesh, inputs=(source,), target=target)


def select_checks(globs: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks of the fixed list whose id matches one of the globs; all without globs."""
    return tuple(
        check for check in fixed_checks() if not globs or any(fnmatch.fnmatchcase(check.id, glob) for glob in globs)
    )
