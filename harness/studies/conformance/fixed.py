"""The fixed list of checks: small tensors, every kind of placement, every operator of the FP8 path."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from harness.trace.operator_checks import PARTIALS, Dtype, Mesh, OperatorCheck, Placements

EVEN, UNEVEN, EMPTY, CUBE = (8, 16), (7, 10), (3, 5), (4, 8, 6)  # by their shards on 4 ranks; CUBE is 3-D

# On a 2-D mesh: FSDP and TP over different dims, over the same dim in both orders, HSDP, and partial sums.
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


def fixed_checks() -> tuple[OperatorCheck, ...]:
    """All checks of the fixed list, in order. Ids are unique."""
    return (
        *_unary_checks(),
        *_binary_checks(),
        *_view_checks(),
        *_transpose_checks(),
        *_cat_and_split_checks(),
        *_matmul_checks(),
        *_redistributions(),
    )


def _unary_checks() -> Iterator[OperatorCheck]:
    whole: list[tuple[str, int | None, bool]] = [(name, None, False) for name in POINTWISE]
    for op, dim, keepdim in (*whole, *REDUCTIONS, *SCALING):
        for mesh, shape, dtype, placements in _grid():
            yield OperatorCheck(
                op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(placements,), dim=dim, keepdim=keepdim
            )
    for mesh, shape, dtype, placements in _grid():
        if dtype == "bfloat16":
            yield OperatorCheck(op="cast.float32", shape=shape, mesh=mesh, dtype=dtype, inputs=(placements,))


def _grid() -> Iterator[tuple[Mesh, tuple[int, ...], Dtype, Placements]]:
    """The meshes, shapes, dtypes and placements that every unary operator is checked on."""
    for placement in ("R", "S0", "S1", *PARTIALS):
        yield "m4", EVEN, "float32", (placement,)
    for placement in ("S0", "S1", "Psum"):
        yield "m4", EVEN, "bfloat16", (placement,)
        yield "m4", UNEVEN, "float32", (placement,)
        yield "m2", EVEN, "float32", (placement,)
    for placement in ("S0", "S1"):
        yield "m4", EMPTY, "float32", (placement,)
    for placement in ("S0", "S1", "S2"):
        yield "m4", CUBE, "float32", (placement,)
    for placements in SQUARE:
        yield "m2x2", EVEN, "float32", placements
    for placements in SQUARE[:2]:
        yield "m2x2", UNEVEN, "float32", placements


def _binary_checks() -> Iterator[OperatorCheck]:
    same = ("R", "S0", "S1", "Psum")
    for op in ("mul", "div"):
        for left in same:
            for right in same:
                yield OperatorCheck(op=op, shape=EVEN, mesh="m4", inputs=((left,), (right,)))
        yield OperatorCheck(op=op, shape=UNEVEN, mesh="m4", inputs=(("S0",), ("S0",)))
        yield OperatorCheck(op=op, shape=EMPTY, mesh="m4", inputs=(("S0",), ("R",)))
        for placements in SQUARE:
            yield OperatorCheck(op=op, shape=EVEN, mesh="m2x2", inputs=(placements, ("R", "R")))
    for op in ("mul.scale", "div.scale"):
        for mesh, shape, dtype, placements in _grid():
            yield OperatorCheck(
                op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(placements, ("R",) * len(placements))
            )
        for left in ("R", "S0", "Psum"):
            for right in ("Pmax", "Psum"):
                yield OperatorCheck(op=op, shape=EVEN, mesh="m4", inputs=((left,), (right,)))


_VIEWS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((4, 8, 6), (32, 6)),
    ((4, 8, 6), (4, 48)),
    ((32, 6), (4, 8, 6)),
    ((8, 16), (8, 4, 4)),
    ((8, 16), (8, 16)),
    ((8, 16), (1, 8, 16)),
)


def _view_checks() -> Iterator[OperatorCheck]:
    for op in ("view", "reshape", "f8.view"):
        for shape, sizes in _VIEWS:
            shards = [f"S{dim}" for dim in range(len(shape))]
            for placement in ("R", *shards, *(("Psum", "Pmax") if op != "f8.view" else ())):
                yield OperatorCheck(op=op, shape=shape, mesh="m4", inputs=((placement,),), sizes=sizes)
        yield OperatorCheck(op=op, shape=(4, 8, 6), mesh="m2x2", inputs=(("S0", "S1"),), sizes=(32, 6))
        yield OperatorCheck(op=op, shape=(4, 8, 6), mesh="m2x2", inputs=(("S0", "S2"),), sizes=(32, 6))
        yield OperatorCheck(op=op, shape=(5, 2, 6), mesh="m4", inputs=(("S0",),), sizes=(10, 6))


def _transpose_checks() -> Iterator[OperatorCheck]:
    for op in ("t", "transpose", "f8.t", "f8.transpose"):
        for mesh, shape, dtype, placements in _grid():
            pending = any(placement[0] == "P" for placement in placements)
            if (len(shape) == 2 or op == "transpose") and not (pending and op.startswith("f8.")):
                yield OperatorCheck(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=(placements,))
    for op in ("f8.clone", "f8.detach"):
        for placements in (("R",), ("S0",), ("S1",)):
            for shape in (EVEN, UNEVEN, EMPTY):
                yield OperatorCheck(op=op, shape=shape, mesh="m4", inputs=(placements,))


def _cat_and_split_checks() -> Iterator[OperatorCheck]:
    """Over the sharded dim and over the other one."""
    for dim in (0, 1):
        for placement in ("R", "S0", "S1", "Psum", "Pmax"):
            for shape in (EVEN, UNEVEN):
                yield OperatorCheck(op="cat", shape=shape, mesh="m4", inputs=((placement,), (placement,)), dim=dim)
                yield OperatorCheck(op="split", shape=shape, mesh="m4", inputs=((placement,),), dim=dim, sizes=(4,))
        for left, right in (("S0", "R"), ("S0", "S1"), ("Psum", "R"), ("Psum", "S0")):
            yield OperatorCheck(op="cat", shape=EVEN, mesh="m4", inputs=((left,), (right,)), dim=dim)
        for op in ("f8.split", "f8.cat"):
            for placement in ("R", "S0", "S1"):
                yield OperatorCheck(op=op, shape=EVEN, mesh="m4", inputs=((placement,),), dim=dim, sizes=(4,))
        for placements in SQUARE[:5]:
            yield OperatorCheck(op="split", shape=EVEN, mesh="m2x2", inputs=(placements,), dim=dim, sizes=(4,))


def _matmul_checks() -> Iterator[OperatorCheck]:
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
) -> OperatorCheck:
    return OperatorCheck(op=op, shape=shape, mesh=mesh, dtype=dtype, inputs=inputs, sizes=(width,))


def _redistributions() -> Iterator[OperatorCheck]:
    shards = ("R", "S0", "S1")
    for shape in (EVEN, UNEVEN, EMPTY):
        for source in (*shards, *PARTIALS):
            for target in shards:
                if source != target:
                    yield _redistribution("redistribute", shape, "m4", (source,), (target,))
                    if source in shards:
                        yield _redistribution("f8.redistribute", shape, "m4", (source,), (target,))
    for placements in SQUARE:
        yield _redistribution("redistribute", EVEN, "m2x2", placements, ("R", "R"))
        if "P" not in "".join(placements):
            yield _redistribution("f8.redistribute", EVEN, "m2x2", placements, ("R", "R"))
    for source_2d, target_2d in ((("S0", "S1"), ("S1", "S0")), (("S0", "R"), ("R", "S0")), (("R", "S0"), ("S0", "S0"))):
        for op in ("redistribute", "f8.redistribute"):
            yield _redistribution(op, EVEN, "m2x2", source_2d, target_2d)


def _redistribution(
    op: str, shape: tuple[int, ...], mesh: Mesh, source: Placements, target: Placements
) -> OperatorCheck:
    return OperatorCheck(op=op, shape=shape, mesh=mesh, inputs=(source,), target=target)


def select_checks(globs: Sequence[str] = ()) -> tuple[OperatorCheck, ...]:
    """The checks of the fixed list whose id matches one of the globs; all of them without globs."""
    return tuple(
        check for check in fixed_checks() if not globs or any(fnmatch.fnmatchcase(check.id, glob) for glob in globs)
    )
