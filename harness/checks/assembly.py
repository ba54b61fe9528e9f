"""Assembly: the sketches of all ranks put together into one sketch per logical tensor. Pure Python: few numbers."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.trace import RankTrace
from harness.trace.sketches import SKETCH_SIZE, TensorSketch

_SUMS = struct.Struct(f"<{SKETCH_SIZE}d")


class SketchKey(NamedTuple):
    """Which tensor of a run: `kind` is "grad" or "param"."""

    step: int
    kind: str
    fqn: str


class Assembled(NamedTuple):
    """One logical tensor: its norm, its signed sums, and how many of its elements owners accounted for."""

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]
    elements: int

    @property
    def complete(self) -> bool:
        """True when the pieces of the owners are the whole tensor, no more and no less."""
        return self.elements == math.prod(self.shape)


def assemble(traces: Iterable[RankTrace]) -> dict[SketchKey, Assembled]:
    """Every sketched tensor of a run, in order of step, kind and FQN."""
    pieces: dict[SketchKey, list[TensorSketch]] = defaultdict(list)
    for trace in traces:
        for sketch in trace.sketches or ():
            if sketch.owner:
                pieces[SketchKey(sketch.step, sketch.kind, sketch.fqn)].append(sketch)
    return {key: _sum(pieces[key]) for key in sorted(pieces)}


def _sum(pieces: Sequence[TensorSketch]) -> Assembled:
    columns = zip(*(_SUMS.unpack(piece.sums) for piece in pieces), strict=True)
    norm = math.sqrt(sum(piece.norm_squared for piece in pieces))  # not fsum, which raises where this is infinite
    elements = sum(math.prod(piece.local_shape) for piece in pieces)
    return Assembled(pieces[0].shape, norm, tuple(sum(column) for column in columns), elements)


def relative_distance(found: Assembled, expected: Assembled) -> float:
    """Estimated |found - expected| / |expected|, within about a quarter; NaN when either is not finite."""
    if not (math.isfinite(found.norm) and math.isfinite(expected.norm)):
        return math.nan
    distance = math.dist(found.sums, expected.sums) / math.sqrt(SKETCH_SIZE)
    if distance == 0 and found.norm == expected.norm:
        return 0.0
    return distance / expected.norm if expected.norm else math.inf


def unequal_replicas(traces: Iterable[RankTrace]) -> list[tuple[SketchKey, tuple[int, ...], dict[int, str]]]:
    """Pieces that several ranks hold and that are not the same bits: (tensor, offset, digest by rank)."""
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
