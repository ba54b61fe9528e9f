"""Assembly: the sketches of all ranks put together into one sketch per logical tensor. Pure; numpy only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.trace import RankTrace
from harness.trace.sketches import TensorSketch


class SketchKey(NamedTuple):
    """Which tensor of a run: `kind` is "grad" or "param"."""

    step: int
    kind: str
    fqn: str


class Assembled(NamedTuple):
    """One logical tensor: its norm, its signed sums, and how many of its elements owners accounted for."""

    shape: tuple[int, ...]
    norm: float
    sums: npt.NDArray[np.float64]
    elements: int

    @property
    def complete(self) -> bool:
        """True when the pieces of the owners are the whole tensor, no more and no less."""
        return self.elements == int(np.prod(self.shape))


def assemble(traces: Iterable[RankTrace]) -> dict[SketchKey, Assembled]:
    """Every sketched tensor of a run, in order of step, kind and FQN."""
    pieces: dict[SketchKey, list[TensorSketch]] = defaultdict(list)
    for trace in traces:
        for sketch in trace.sketches or ():
            if sketch.owner:
                pieces[SketchKey(sketch.step, sketch.kind, sketch.fqn)].append(sketch)
    return {key: _sum(pieces[key]) for key in sorted(pieces)}


def _sum(pieces: list[TensorSketch]) -> Assembled:
    sums = np.sum([np.frombuffer(piece.sums, dtype="<f8") for piece in pieces], axis=0)
    norm = float(np.sqrt(sum(piece.norm_squared for piece in pieces)))
    elements = sum(int(np.prod(piece.local_shape)) for piece in pieces)
    return Assembled(pieces[0].shape, norm, sums, elements)


def relative_distance(found: Assembled, expected: Assembled) -> float:
    """Estimated |found - expected| / |expected|, within about a quarter; NaN when either is not finite."""
    distance = float(np.sqrt(np.mean((found.sums - expected.sums) ** 2)))
    if distance == 0 and found.norm == expected.norm:
        return 0.0
    return distance / expected.norm if expected.norm else float("inf")


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
