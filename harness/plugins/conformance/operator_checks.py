"""The operator check: one operator on DTensor inputs, and what the ranks observed.

Placements are written as one word per mesh axis: `R` is Replicate(), `S1` is Shard(1), `T0` is Shard(0) applied after
the axes to the right (FSDP over TP), `Psum`, `Pavg`, `Pmax` and `Pmin` are Partial() with that reduction.
"""

from collections.abc import Sequence
from typing import Literal

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
        """Unique and readable: `amax.d1k-8x16-f32-m4-S0`."""
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
        """The operator with its dim: `amax.d1k`."""
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

    `error` is empty when nothing was raised; `consequence` is True when the error only reports that another rank left.
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


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Shard sizes as torch.chunk gives them: equal chunks, rounded up; the last ones are smaller or empty."""
    size = -(-length // parts)
    return tuple(max(min(size, length - index * size), 0) for index in range(parts))


def local_shape(
    shape: Sequence[int], placements: Placements, axes: Sequence[int], coordinates: Sequence[int]
) -> tuple[int, ...]:
    local = list(shape)
    for axis in axis_order(placements):
        dim = shard_dim(placements[axis])
        if dim is not None:
            local[dim] = chunk_sizes(local[dim], axes[axis])[coordinates[axis]]
    return tuple(local)


def axis_order(placements: Placements) -> list[int]:
    """Mesh axes in the order in which they shard the tensor: those of `T` placements come last."""
    return sorted(range(len(placements)), key=lambda axis: (placements[axis][0] == "T", axis))


def shard_kind(check: OperatorCheck) -> Literal["even", "uneven", "empty"]:
    """ "even" for shards of equal size, "empty" when some rank holds nothing, otherwise "uneven"."""
    dims = zip(map(shard_dim, check.inputs[0]), check.axes, strict=True)
    shards = [chunk_sizes(check.shape[dim], size) for dim, size in dims if dim is not None]
    if any(0 in sizes for sizes in shards):
        return "empty"
    return "uneven" if any(len(set(sizes)) > 1 for sizes in shards) else "even"
