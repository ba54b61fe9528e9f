"""Assembly: the sketches of all ranks summed into one per logical tensor, and how far apart two numbers are."""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.trace import RankTrace
from harness.trace.tensors import SKETCH_SIZE, TensorSketch

_SUMS = struct.Struct(f"<{SKETCH_SIZE}d")


class SketchKey(NamedTuple):
    """Which tensor of a run."""

    step: int
    kind: str
    fqn: str


class Assembled(NamedTuple):
    """One logical tensor: its norm, its signed sums, and the number of elements in the shards of all owners."""

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]
    elements: int

    @property
    def complete(self) -> bool:
        """True when the shards of the owners have as many elements as the tensor."""
        return self.elements == math.prod(self.shape)


def assemble(traces: Iterable[RankTrace]) -> dict[SketchKey, Assembled]:
    """Every sketched tensor of a run, sorted by step, kind and FQN."""
    shards: dict[SketchKey, list[TensorSketch]] = defaultdict(list)
    for trace in traces:
        for sketch in trace.sketches or ():
            if sketch.owner:
                shards[SketchKey(sketch.step, sketch.kind, sketch.fqn)].append(sketch)
    return {key: _sum(shards[key]) for key in sorted(shards)}


def _sum(shards: Sequence[TensorSketch]) -> Assembled:
    columns = zip(*(_SUMS.unpack(shard.sums) for shard in shards), strict=True)
    norm = math.sqrt(sum(shard.norm_squared for shard in shards))  # not fsum, which raises where this is infinite
    elements = sum(math.prod(shard.local_shape) for shard in shards)
    return Assembled(shards[0].shape, norm, tuple(sum(column) for column in columns), elements)


def relative_distance(found: Assembled, expected: Assembled) -> float:
    """Estimated |found - expected| / |expected|, within about a quarter; NaN when either is not finite."""
    if not (math.isfinite(found.norm) and math.isfinite(expected.norm)):
        return math.nan
    distance = math.dist(found.sums, expected.sums) / math.sqrt(SKETCH_SIZE)
    if distance == 0 and found.norm == expected.norm:
        return 0.0
    return distance / expected.norm if expected.norm else math.inf


def relative_distances(
    found: Mapping[SketchKey, Assembled], expected: Mapping[SketchKey, Assembled], *, ignored: float = 0.0
) -> dict[SketchKey, float]:
    """The relative distance of every tensor that both sides sketched.

    A distance of at most `ignored` of the norm of all tensors of that step and kind is none. Some gradients are sums
    whose terms cancel, and consist of rounding errors alone: the bias of attention's keys, which softmax does
    not see.
    """
    norms: dict[tuple[int, str], list[float]] = defaultdict(list)
    for key, tensor in expected.items():
        norms[key.step, key.kind].append(tensor.norm)
    totals = {of: math.hypot(*tensor_norms) for of, tensor_norms in norms.items()}
    return {
        key: 0.0
        if _apart(found[key], expected[key]) <= ignored * totals[key.step, key.kind] < math.inf
        else relative_distance(found[key], expected[key])
        for key in expected
        if key in found
    }


def _apart(found: Assembled, expected: Assembled) -> float:
    """The larger of the distance and the difference of norms; NaN when either is not finite."""
    if not (math.isfinite(found.norm) and math.isfinite(expected.norm)):
        return math.nan
    return max(math.dist(found.sums, expected.sums) / math.sqrt(SKETCH_SIZE), abs(found.norm - expected.norm))


def nan_as_inf(distance: float) -> float:
    """A distance to sort by: NaN becomes infinite."""
    return math.inf if math.isnan(distance) else distance


def largest(values: Iterable[float], *, empty: float = math.nan) -> float:
    """The largest of the values, or NaN if it is among them; `empty` where there is none."""
    return max(values, key=nan_as_inf, default=empty)


def sum_of(traces: Iterable[RankTrace], key: SketchKey) -> Assembled:
    """The sum of what all ranks hold of a tensor, replicas included."""
    return _sum(_of(traces, key))


def wrong_ranks(found: Sequence[RankTrace], expected: Sequence[RankTrace], key: SketchKey, allowed: float) -> list[int]:
    """The ranks whose own part of a tensor is further off than allowed; none where one rank has no such pieces.

    The single-rank reference is sketched in the pieces that FSDP2 ranks hold.
    """
    pieces = _of(expected, key)
    wrong = []
    for trace in found:
        for shard in _of((trace,), key):
            same = [piece for piece in pieces if _is_inside(piece, shard)]
            if sum(math.prod(piece.local_shape) for piece in same) != math.prod(shard.local_shape):
                return []
            if same and not relative_distance(_sum([shard]), _sum(same)) <= allowed:  # NaN is wrong
                wrong.append(trace.rank)
    return wrong


def _of(traces: Iterable[RankTrace], key: SketchKey) -> list[TensorSketch]:
    sketches = (sketch for trace in traces for sketch in trace.sketches or ())
    return [sketch for sketch in sketches if (sketch.step, sketch.kind, sketch.fqn) == key]


def _is_inside(piece: TensorSketch, shard: TensorSketch) -> bool:
    return all(
        begin <= at and at + size <= begin + length
        for at, size, begin, length in zip(
            piece.offset, piece.local_shape, shard.offset, shard.local_shape, strict=True
        )
    )


def unequal_replicas(traces: Iterable[RankTrace]) -> list[tuple[SketchKey, tuple[int, ...], dict[int, str]]]:
    """Shards that several ranks hold and that are not bitwise equal there: (tensor, offset, digest by rank)."""
    holders: dict[tuple[SketchKey, tuple[int, ...], tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for trace in traces:
        for sketch in trace.sketches or ():
            key = SketchKey(sketch.step, sketch.kind, sketch.fqn)
            holders[key, sketch.offset, sketch.local_shape][trace.rank] = sketch.digest
    return [
        (key, offset, digests)
        for (key, offset, _), digests in sorted(holders.items())
        if len(set(digests.values())) > 1
    ]


def size_of_error(name: str, found: float, expected: float) -> float:
    """How far off a reported number is: nats for a loss, relative for a gradient norm (NaN if it must be 0)."""
    difference = abs(found - expected)
    if name == "loss":
        return difference
    return difference / abs(expected) if expected else math.nan


def same_number(found: float, expected: float) -> bool:
    """True for equal numbers, and for NaN on both sides."""
    return found == expected or (math.isnan(found) and math.isnan(expected))


def same_numbers(found: Sequence[float], expected: Sequence[float]) -> bool:
    return len(found) == len(expected) and all(map(same_number, found, expected))
