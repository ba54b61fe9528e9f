"""Tensors of a state, whole or in parts of ranks and files, which are read piece by piece and never at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.plugins.handoff.numbers import Array, decoded, with_scales

PIECE = 1 << 20  # values that are compared at once


class Part(NamedTuple):
    """What one rank or file holds of a tensor. `raw`: its bits, of a file mapped and not read."""

    offsets: tuple[int, ...]
    raw: Array
    where: str  # "model.safetensors at byte 1024", "rank 1", or empty
    rank: int | None = None
    memory: int = 0  # where it is in the memory of this process; 0 for a file


class Held(NamedTuple):
    """A tensor: its name, its dtype as safetensors calls it, its shape, and its parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def where(self) -> str:
        return self.parts[0].where if self.parts else ""

    def read(self, index: tuple[slice, ...]) -> Array:
        """Return the bits of a region; where no part has them they are zero, and the gap is found elsewhere."""
        if len(self.parts) == 1 and self.parts[0].raw.shape == self.shape:
            return np.asarray(self.parts[0].raw[index])
        bounds = [each.indices(size)[:2] for each, size in zip(index, self.shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], self.parts[0].raw.dtype)
        for part in self.parts:
            places = list(zip(bounds, part.offsets, part.raw.shape, strict=True))
            cut = [(max(start, at), min(stop, at + size)) for (start, stop), at, size in places]
            if all(low < high for low, high in cut):
                into = tuple(
                    slice(low - start, high - start) for (low, high), (start, _) in zip(cut, bounds, strict=True)
                )
                here = tuple(slice(low - at, high - at) for (low, high), at in zip(cut, part.offsets, strict=True))
                out[into] = part.raw[here]
        return out


def bits_of(raw: Array) -> Array:
    """Return the bytes of an array, in a row."""
    return np.ascontiguousarray(raw).reshape(-1).view("u1")


class State(NamedTuple):
    """The tensors that change hands, by name; with the `config.json` beside them, and what is no tensor."""

    origin: str
    tensors: Mapping[str, Held]
    config: Mapping[str, Any] = {}
    not_tensors: tuple[str, ...] = ()

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The `quantization_config`; empty where there is none."""
        found = self.config.get("quantization_config", self.config.get("quantization", {}))
        return found if isinstance(found, dict) else {}


class View(NamedTuple):
    """Rows of a tensor, or of one matrix of a stack of them. A vector has one column."""

    held: Held
    at: tuple[int, ...] = ()  # of the matrix, such as the expert
    start: int = 0
    stop: int = -1  # -1: all rows

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        inner = self.held.shape[len(self.at) :]
        rows = (inner[0] if inner else 1) if self.stop < 0 else self.stop - self.start
        return rows, math.prod(inner[1:])

    def rows(self, start: int, stop: int) -> Array:
        """Return the bits of some rows, as a matrix."""
        stop = min(stop, self.shape[0])
        if not self.held.shape:
            return self.held.read(()).reshape(1, 1)[start:stop]
        one = tuple(slice(at, at + 1) for at in self.at)
        whole = (slice(None),) * (len(self.held.shape) - len(self.at) - 1)
        raw = self.held.read((*one, slice(self.start + start, self.start + stop), *whole))
        return raw.reshape(stop - start, self.shape[1])

    def values(self, start: int, stop: int) -> Array:
        """Return the values of some rows."""
        return decoded(self.rows(start, stop), self.held.dtype)

    def cut(self, start: int, stop: int) -> "View":
        """Return some rows of it."""
        return self._replace(start=self.start + start, stop=self.start + stop)


class Scaled(NamedTuple):
    """A quantized view with its scales, read as what it stands for."""

    view: View
    scales: Array  # of all blocks
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.view.shape

    def values(self, start: int, stop: int) -> Array:
        """Return the dequantized values of some rows."""
        stop, height = min(stop, self.shape[0]), self.block[0]
        scales = self.scales[:1] if not height else self.scales[start // height : -(-stop // height)]
        if height > 1:
            scales = np.repeat(scales, height, axis=0)[start % height :][: stop - start]
        data, block = self.view.values(start, stop), (1 if height else 0, self.block[1])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return with_scales(np.multiply, data, scales, block)


class Stack(NamedTuple):
    """Views below one another, as fused weights have them."""

    views: tuple[View | Scaled, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(view.shape[0] for view in self.views), self.views[0].shape[1]

    def values(self, start: int, stop: int) -> Array:
        """Return the values of some rows."""
        found, at = [], 0
        for view in self.views:
            low, high = max(start - at, 0), min(stop - at, view.shape[0])
            if low < high:
                found.append(view.values(low, high))
            at += view.shape[0]
        return np.concatenate(found) if len(found) != 1 else found[0]


Matrix = View | Scaled | Stack


def pieces(shape: Sequence[int], height: int = 1) -> Iterator[tuple[int, int]]:
    """Yield rows from and to, whole blocks of so many rows at a time."""
    rows, columns = shape
    step = max(PIECE // max(columns, 1) // height, 1) * height
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
