"""The operator check: one operator on DTensor inputs, and what the ranks observed; and the fixed list of checks.

Placements are written as one word per mesh axis: `R` is Replicate(), `S1` is Shard(1), `T0` is Shard(0) applied after
the axes to the right (FSDP over TP), `Psum`, `Pavg`, `Pmax` and `Pmin` are Partial() with that reduction. The list has
small tensors, every kind of placement, and every operator of the FP8 path.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

import msgspec

from harness.matrix.linears import shard_size, shard_sizes
from harness.trace.record import Patch, Record

Mesh = Literal["m2", "m4", "m2x2"]
Dtype = Literal["float32", "bfloat16"]
Placements = tuple[str, ...]

MESHES: dict[Mesh, tuple[int, ...]] = {"m2": (2,), "m4": (4,), "m2x2": (2, 2)}
WORLD_SIZE = 4  # ranks of a job; on `m2` two pairs of ranks run the same check
MATMULS = frozenset({"mm", "f8.mm", "f8.mm.rowwise"})
PARTIALS = ("Psum", "Pavg", "Pmax", "Pmin")
_SHORT = {"float32": "f32", "bfloat16": "bf16"}


class OperatorCheck(Record, frozen=True, kw_only=True):
    """One operator on inputs with given placements. `dim`, `keepdim`, `sizes` and `target` are arguments of some.

    `shape` is the first input's; the operator determines the others. `sizes` is the new shape of a view, the size
    of a split or the width of a matmul; `target` is the placements of a redistributed result.
    """

    op: str
    shape: tuple[int, ...]
    mesh: Mesh
    inputs: tuple[Placements, ...]
    dtype: Dtype = "float32"
    dim: int | None = None
    keepdim: bool = False
    sizes: tuple[int, ...] = ()
    target: Placements = ()

    @property
    def id(self) -> str:
        """Return a unique and readable name: `amax.d1k-8x16-f32-m4-S0`."""
        words = [
            self.row + (f".{'x'.join(map(str, self.sizes))}" if self.sizes else ""),
            "x".join(map(str, self.shape)),
            _SHORT[self.dtype],
            self.mesh,
            "*".join(".".join(placements) for placements in self.inputs),
        ]
        return "-".join(words) + (f"-to.{'.'.join(self.target)}" if self.target else "")

    @property
    def axes(self) -> tuple[int, ...]:
        return MESHES[self.mesh]

    @property
    def row(self) -> str:
        """Return the operator with its dim: `amax.d1k`."""
        return self.op + ("" if self.dim is None else f".d{self.dim}{'k' if self.keepdim else ''}")


class Output(Record, frozen=True, kw_only=True):
    """One result of an operator on one rank. `wrong` counts the elements of the full tensor that differ."""

    placements: Placements | None  # None: a plain tensor came out
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    expected_shape: tuple[int, ...]
    expected_dtype: str
    wrong: int
    largest_error: float
    example: str  # "[0, 3] = 1.0, expected 2.0"


class Observation(Record, frozen=True, kw_only=True):
    """What one rank observed in one check. `wire_bytes` are the bytes it received, `calls` the collectives.

    `error` is empty when nothing was raised; `consequence` is True if the error only reports that another rank left.
    """

    rank: int
    coordinates: tuple[int, ...]  # in the mesh of the check
    error: str = ""
    phase: Literal["inputs", "operator", "result"] = "result"
    consequence: bool = False
    outputs: tuple[Output, ...] = ()
    wire_bytes: float = 0.0
    calls: tuple[str, ...] = ()


class Batch(Record, frozen=True, kw_only=True):
    """The payload of a job: checks to run after applying `injections` in every rank."""

    checks: tuple[OperatorCheck, ...]
    injections: tuple[Patch, ...] = ()


def shard_dim(placement: str) -> int | None:
    return int(placement[1:]) if placement[0] in "ST" else None


def local_shape(
    shape: Sequence[int], placements: Placements, axes: Sequence[int], coordinates: Sequence[int]
) -> tuple[int, ...]:
    local = list(shape)
    for axis in axis_order(placements):
        dim = shard_dim(placements[axis])
        if dim is not None:
            local[dim] = shard_size(local[dim], axes[axis], coordinates[axis])
    return tuple(local)


def axis_order(placements: Placements) -> list[int]:
    """Return the mesh axes in the order in which they shard the tensor: those of `T` placements come last."""
    return sorted(range(len(placements)), key=lambda axis: (placements[axis][0] == "T", axis))


def shard_kind(check: OperatorCheck) -> Literal["even", "uneven", "empty"]:
    """ "even" for shards of equal size, "empty" when some rank holds nothing, otherwise "uneven"."""
    dims = zip(map(shard_dim, check.inputs[0]), check.axes, strict=True)
    shards = [shard_sizes(check.shape[dim], size) for dim, size in dims if dim is not None]
    if any(0 in sizes for sizes in shards):
        return "empty"
    return "uneven" if any(len(set(sizes)) > 1 for sizes in shards) else "even"


EVEN, UNEVEN, EMPTY, CUBE = (8, 16), (7, 10), (3, 5), (4, 8, 6)  # by their shards on 4 ranks; CUBE is 3-D

# On a 2-D mesh: FSDP and TP over different dims, over the same dim in both orders, HSDP, and partial sums.
SQUARE = ("S0.S1", "S0.S0", "T0.S0", "R.S0", "S1.R", "Psum.S0", "S1.Psum", "Psum.R", "Psum.Psum")

# mesh, shape, dtype, placements on which every operator of one tensor is checked
_GRID = (
    ("m4", EVEN, "float32", ("R", "S0", "S1", *PARTIALS)),
    ("m4", EVEN, "bfloat16", ("S0", "S1", "Psum")),
    ("m4", UNEVEN, "float32", ("S0", "S1", "Psum")),
    ("m2", EVEN, "float32", ("S0", "S1", "Psum")),
    ("m4", EMPTY, "float32", ("S0", "S1")),
    ("m4", CUBE, "float32", ("S0", "S1", "S2")),
    ("m2x2", EVEN, "float32", SQUARE),
    ("m2x2", UNEVEN, "float32", SQUARE[:2]),
)
_POINTWISE = "abs clamp clamp.min reciprocal cast.bfloat16 cast.float64 cast.e4m3 cast.e5m2"
_REDUCTIONS = (
    *(("amax", dim, keepdim) for dim, keepdim in ((None, False), (0, False), (0, True), (-1, False), (-1, True))),
    ("amin", -1, True),
    ("max", None, False),
    ("max", 0, False),
    ("max", -1, True),
    ("aminmax", None, False),
    ("aminmax", -1, True),
)
_SCALING = "tensor_to_amax tensor_to_scale tensor_to_scale.pow2 to_float8"
_VIEWS = (
    ((4, 8, 6), (32, 6)),
    ((4, 8, 6), (4, 48)),
    ((32, 6), (4, 8, 6)),
    ((8, 16), (8, 4, 4)),
    ((8, 16), (8, 16)),
    ((8, 16), (1, 8, 16)),
)


def fixed_checks() -> tuple[OperatorCheck, ...]:
    """Return all checks of the fixed list, in order. Ids are unique."""
    return (
        *_unary_checks(),
        *_binary_checks(),
        *_view_checks(),
        *_transpose_checks(),
        *_cat_and_split_checks(),
        *_matmul_checks(),
        *_redistributions(),
        *_casts_of_blocks(),
    )


def select_checks(globs: Sequence[str] = ()) -> tuple[OperatorCheck, ...]:
    """Return the checks of the fixed list whose id matches one of the globs; all of them without globs."""
    return tuple(
        check for check in fixed_checks() if not globs or any(fnmatch.fnmatchcase(check.id, glob) for glob in globs)
    )


def _check(op: str, shape: tuple[int, ...], *inputs: str, **fields: object) -> OperatorCheck:
    """Return the check with an input of each of these placements; on `m4` or `m2x2` by default."""
    placed = [_placed(words) for words in inputs]
    mesh = "m4" if len(placed[0]) == 1 else "m2x2"
    return msgspec.convert({"op": op, "shape": shape, "inputs": placed, "mesh": mesh, **fields}, OperatorCheck)


def _placed(words: str) -> Placements:
    """Placements from words with "." between mesh axes."""
    return tuple(words.split("."))


def _on_grid(op: str, **fields: object) -> Iterator[OperatorCheck]:
    for mesh, shape, dtype, layouts in _GRID:
        for placements in layouts:
            yield _check(op, shape, placements, mesh=mesh, dtype=dtype, **fields)


def _unary_checks() -> Iterator[OperatorCheck]:
    scaling = [(op, dim, False) for op in _SCALING.split() for dim in (None, -1, 0)]
    for op in _POINTWISE.split():
        yield from _on_grid(op)
    for op, dim, keepdim in (*_REDUCTIONS, *scaling):
        yield from _on_grid(op, dim=dim, keepdim=keepdim)
    yield from (check for check in _on_grid("cast.float32") if check.dtype == "bfloat16")


def _binary_checks() -> Iterator[OperatorCheck]:
    same = ("R", "S0", "S1", "Psum")
    for op in ("mul", "div"):
        for left, right in product(same, same):
            yield _check(op, EVEN, left, right)
        yield _check(op, UNEVEN, "S0", "S0")
        yield _check(op, EMPTY, "S0", "R")
        for placements in SQUARE:
            yield _check(op, EVEN, placements, "R.R")
    for op in ("mul.scale", "div.scale"):
        for check in _on_grid(op):
            scalar = ("R",) * len(check.axes)
            yield msgspec.structs.replace(check, inputs=(*check.inputs, scalar))
        for left, right in product(("R", "S0", "Psum"), ("Pmax", "Psum")):
            yield _check(op, EVEN, left, right)


def _view_checks() -> Iterator[OperatorCheck]:
    for op in ("view", "reshape", "f8.view"):
        pending = () if op == "f8.view" else ("Psum", "Pmax")
        for shape, sizes in _VIEWS:
            for placement in ("R", *(f"S{dim}" for dim in range(len(shape))), *pending):
                yield _check(op, shape, placement, sizes=sizes)
        yield _check(op, CUBE, "S0.S1", sizes=(32, 6))
        yield _check(op, CUBE, "S0.S2", sizes=(32, 6))
        yield _check(op, (5, 2, 6), "S0", sizes=(10, 6))


def _transpose_checks() -> Iterator[OperatorCheck]:
    for op in ("t", "transpose", "f8.t", "f8.transpose"):
        for check in _on_grid(op):
            pending = any(placement[0] == "P" for placement in check.inputs[0])
            if (len(check.shape) == 2 or op == "transpose") and not (pending and op.startswith("f8.")):
                yield check
    for op, placement, shape in product(("f8.clone", "f8.detach"), ("R", "S0", "S1"), (EVEN, UNEVEN, EMPTY)):
        yield _check(op, shape, placement)


def _cat_and_split_checks() -> Iterator[OperatorCheck]:
    for dim in (0, 1):
        for placement, shape in product(("R", "S0", "S1", "Psum", "Pmax"), (EVEN, UNEVEN)):
            yield _check("cat", shape, placement, placement, dim=dim)
            yield _check("split", shape, placement, dim=dim, sizes=(4,))
        for left, right in (("S0", "R"), ("S0", "S1"), ("Psum", "R"), ("Psum", "S0")):
            yield _check("cat", EVEN, left, right, dim=dim)
        for op, placement in product(("f8.split", "f8.cat"), ("R", "S0", "S1")):
            yield _check(op, EVEN, placement, dim=dim, sizes=(4,))
        for placements in SQUARE[:5]:
            yield _check("split", EVEN, placements, dim=dim, sizes=(4,))


def _matmul_checks() -> Iterator[OperatorCheck]:
    for left, right in product(("R", "S0", "S1", "Psum"), repeat=2):
        for dtype in ("float32", "bfloat16"):
            yield _check("mm", EVEN, left, right, dtype=dtype, sizes=(12,))
        for op in ("f8.mm", "f8.mm.rowwise") if "Psum" not in (left, right) else ():
            yield _check(op, (16, 64), left, right, sizes=(64,))
            yield _check(op, (32, 64), left, right, mesh="m2", dtype="bfloat16", sizes=(128,))
    for left, right in (("S0", "R"), ("R", "S1"), ("S1", "S0")):
        yield _check("mm", UNEVEN, left, right, sizes=(5,))
        yield _check("mm", EMPTY, left, right, sizes=(2,))
    squares = (
        ("S0.R", "R.S1"),
        ("S0.S1", "R.S0"),
        ("R.R", "S1.S1"),
        ("R.R", "T1.S1"),
        ("T0.S0", "R.R"),
        ("Psum.S0", "R.R"),
    )
    for left, right in squares:
        yield _check("mm", EVEN, left, right, sizes=(12,))
    for left, right in squares[:5]:
        yield _check("f8.mm", (16, 64), left, right, sizes=(64,))
        yield _check("f8.mm.rowwise", (16, 64), left, right, sizes=(64,))


def _casts_of_blocks() -> Iterator[OperatorCheck]:
    """The casts of MXFP8 along rows and columns, of whole blocks on every rank, rounded up (RCEIL) and down (FLOOR)."""
    for op in ("mxfp8.rows", "mxfp8.rows.floor", "mxfp8.columns", "mxfp8.columns.floor"):
        for placement in ("R", "S0", "S1", "Psum"):
            yield _check(op, (128, 256), placement, dtype="bfloat16")
        for placements in ("S0.S1", "S0.S0", "R.S1"):
            yield _check(op, (128, 256), placements, dtype="bfloat16")


def _redistributions() -> Iterator[OperatorCheck]:
    shards = ("R", "S0", "S1")
    for shape, source, target in product((EVEN, UNEVEN, EMPTY), (*shards, *PARTIALS), shards):
        if source != target:
            yield _check("redistribute", shape, source, target=_placed(target))
            if source in shards:
                yield _check("f8.redistribute", shape, source, target=_placed(target))
    for source in SQUARE:
        yield _check("redistribute", EVEN, source, target=("R", "R"))
        if "P" not in source:
            yield _check("f8.redistribute", EVEN, source, target=("R", "R"))
    for source, target in (("S0.S1", "S1.S0"), ("S0.R", "R.S0"), ("R.S0", "S0.S0")):
        for op in ("redistribute", "f8.redistribute"):
            yield _check(op, EVEN, source, target=_placed(target))
