"""Quantized values beside the source, block by block; and with which scales they were made, where these do not fit.

A value is right within half a quantum of its own scale: `|data - source / scale| <= quantum / 2`. Those who quantize
divide in float32, which moves a value by 2^-23 of itself, below 2^-17 of half a quantum of float8.
"""

import functools
from typing import NamedTuple

import numpy as np

from harness.plugins.handoff import numbers
from harness.plugins.handoff.formats import Format
from harness.plugins.handoff.tensors import Matrix, Scaled, View, pieces

_SLACK = 1 + 2**-16  # of half a quantum, for what a division in float32 rounds
CLAMPED = 1e-4  # DeepSeek's smallest amax of a block: what is smaller gets the scale of this


class Blocks(NamedTuple):
    """What each block has: values that are off, the largest of the source and of the data, those that are no number."""

    bad: numbers.Array
    amax: numbers.Array
    largest: numbers.Array
    nonfinite: numbers.Array
    first: tuple[int, int, float, float] | None  # the first value that is off: row, column, of the source, dequantized

    @property
    def off(self) -> int:
        return int(self.bad.sum())


class Kind(NamedTuple):
    """How data are stored: the format, its dtype, and what the source is cast to before."""

    format: Format
    dtype: str
    through: str = ""


@functools.cache
def _bounds(dtype: str, clips: bool) -> tuple[numbers.Array, numbers.Array]:
    """Return between which numbers each byte is the nearest one, and none for a byte that is no number.

    `clips`: a scale that is rounded down leaves values up to the next power of two for the largest number.
    """
    values = numbers.table(dtype).astype(np.float64)
    size = np.where(np.isfinite(values), np.abs(values), 0)
    step = numbers.quantum(size, dtype)
    below = size - _half_below(size, dtype) * _SLACK
    above = np.where(
        clips & (size == numbers.FLOATS[dtype].largest),
        2 ** np.ceil(np.log2(size + (size == 0))),
        size + step / 2 * _SLACK,
    )
    below = np.where(size == 0, -above, below)
    is_negative = np.signbit(values) & (size > 0)
    low, high = np.where(is_negative, -above, below), np.where(is_negative, -below, above)
    lost = ~np.isfinite(values)
    return np.where(lost, np.inf, low).astype(np.float32), np.where(lost, -np.inf, high).astype(np.float32)


def _half_below(size: numbers.Array, dtype: str) -> numbers.Array:
    """Return half of the distance to the next smaller number, which a power of two has nearer."""
    is_power = (np.frexp(size)[0] == 0.5) & (size >= 2.0 ** (numbers.FLOATS[dtype].least + 1))
    return numbers.quantum(size, dtype) / np.where(is_power, 4, 2)


def compare(source: Matrix, data: View, scales: numbers.Array, kind: Kind) -> Blocks:
    """Compare a weight with the source, some rows at a time."""
    block, shape = kind.format.block, data.shape
    sums = [np.zeros(scales.shape) for _ in range(4)]
    first = None
    low, high = _bounds(kind.dtype, kind.format.clips)
    size = np.where(np.isfinite(numbers.table(kind.dtype)), np.abs(numbers.table(kind.dtype)), 0)
    for start, stop in pieces(shape, block[0] or 1):
        rows = slice(0, 1) if not block[0] else slice(start // block[0], -(-stop // block[0]))
        x, codes, own = _source(source, start, stop, kind), data.rows(start, stop), scales[rows].astype(np.float32)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            wanted = numbers.with_scales(np.divide, x, own, block)
        wanted = wanted if own.all() else np.where(x == 0, 0, wanted)
        off = ~((low[codes] <= wanted) & (wanted <= high[codes]))
        if first is None and off.any():
            row, column = np.argwhere(off)[0]
            found = Scaled(data, scales, block).values(start + row, start + row + 1)
            first = int(start + row), int(column), float(x[row, column]), float(found[0, column])
        lost = ~np.isfinite(numbers.table(kind.dtype))[codes]
        new = [numbers.over_blocks(np.add, off, block), numbers.over_blocks(np.maximum, np.abs(x), block)]
        new += [numbers.over_blocks(np.maximum, size[codes], block), numbers.over_blocks(np.add, lost, block)]
        for sum_, more, join in zip(sums, new, (np.add, np.maximum, np.maximum, np.add), strict=True):
            sum_[rows] = join(sum_[rows], more)
    return Blocks(sums[0], sums[1], sums[2], sums[3], first)


def _source(source: Matrix, start: int, stop: int, kind: Kind) -> numbers.Array:
    values = source.values(start, stop)
    return (numbers.rounded(values, kind.through) if kind.through else values).astype(np.float32)


def used_scale(x: numbers.Array, q: numbers.Array, dtype: str) -> tuple[float, float] | None:
    """Return between which bounds the one scale is with which these data were made; None where no one scale made them.

    Each value that was rounded to data says that the source, divided by the scale, lay between two midpoints.
    """
    x, q, largest = (
        np.abs(x.ravel()),
        np.where(np.sign(x) * np.sign(q) < 0, np.nan, np.abs(q)).ravel(),
        numbers.FLOATS[dtype].largest,
    )
    if not np.isfinite(q).all() or not x.any():
        return None
    below, above = q - _half_below(q, dtype), np.where(q == largest, np.inf, q + numbers.quantum(q, dtype) / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where(x > 0, x / above, 0.0).max()
        most = np.where((below > 0) & (q > 0), x / below, np.inf).min()
    least, most = float(least) * (1 - 2**-20), float(most) * (1 + 2**-20)
    return (least, most) if 0 < most < np.inf and least <= most else None


def _likely(bounds: tuple[float, float], amax: float, dtype: str) -> float:
    """Return the scale between these bounds that somebody has likely computed."""
    plain = float(np.float32(amax) / np.float32(numbers.FLOATS[dtype].largest))
    power = 2.0 ** np.ceil(np.log2(bounds[0])) if bounds[0] > 0 else 0.0
    for scale in (plain, power):
        if bounds[0] <= scale <= bounds[1]:
            return float(scale)
    return float(np.sqrt(max(bounds[0], bounds[1] / 2) * bounds[1]))


# Why data and scales do not fit

_MOST = 64  # blocks that are looked at
_ENOUGH = 0.9  # of them must show the same
_ROWS = 256  # of a block, where it is a whole column of a weight


class Seen(NamedTuple):
    """A block, between which bounds the scale lies that it was made with, which it likely is, and the stored one."""

    place: tuple[int, int]
    bounds: tuple[float, float]
    used: float
    stored: float


def explain(source: Matrix, data: View, scales: numbers.Array, kind: Kind, blocks: Blocks) -> tuple[str, Seen] | None:
    """Return how the scales came about, with the first block; None where no one scale made the data of these blocks."""
    height, width = kind.format.block
    seen = []
    places = [(int(row), int(column)) for row, column in np.argwhere(blocks.bad)[:_MOST]]
    for place in places:
        start, columns = place[0] * height, slice(place[1] * width, (place[1] + 1) * width if width else None)
        stop = min(start + (min(height, _ROWS) or _ROWS), data.shape[0])
        bounds = used_scale(source.values(start, stop)[:, columns], data.values(start, stop)[:, columns], kind.dtype)
        if bounds is not None:
            seen.append(
                Seen(place, bounds, _likely(bounds, float(blocks.amax[place]), kind.dtype), float(scales[place]))
            )
    if len(seen) < max(1, _ENOUGH * len(places)) or seen[0].used == seen[0].stored:
        return None
    return _how(seen, scales), seen[0]


def _all(seen: list[Seen], holds: list[bool]) -> bool:
    return sum(holds) >= _ENOUGH * len(seen)


def _how(seen: list[Seen], scales: numbers.Array) -> str:
    """Return the first of these that explains nine of ten blocks."""
    stored = np.array([one.stored for one in seen])
    least, most = (np.array([one.bounds[at] for one in seen]) for at in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = (stored <= 2 * most) & (stored >= least / 2) & numbers.is_power_of_two(stored)
        made_with_power = numbers.is_power_of_two(np.array([one.used for one in seen]))
        reciprocal = (1 / stored >= least) & (1 / stored <= most)
        ratios = (np.max(stored / most), np.min(stored / np.maximum(least, 1e-300)))
    if _all(seen, list(powers & ~made_with_power)):
        return "they were rounded to powers of two after the cast"
    if _all(seen, list(reciprocal)):
        return "they are the reciprocals of those that it was quantized with"
    moved = _moved(seen, scales)
    if moved:
        return moved
    if ratios[0] <= ratios[1]:
        return f"all of them are {np.sqrt(ratios[0] * ratios[1]):.3g} times those that it was quantized with"
    return "they are others than those that it was quantized with"


def _moved(seen: list[Seen], scales: numbers.Array) -> str:
    """Return how the scales are permuted; empty where they are not."""
    if scales.size < 2 or len(np.unique(scales)) < 2:
        return ""
    down, across = scales.shape
    layouts = {
        "are transposed": scales.reshape(across, down).T,
        "are in the swizzled layout of kernels": unswizzled(scales),
        "are in reverse": scales[::-1, ::-1] if 1 in scales.shape else scales[::-1],
    }
    for words, layout in layouts.items():
        if layout is not None and _all(seen, [_fits(one, float(layout[one.place])) for one in seen]):
            return f"they {words}"
    at = np.array(seen[0].place)
    near = np.argwhere((scales >= seen[0].bounds[0]) & (scales <= seen[0].bounds[1]))
    for place in near[np.abs(near - at).sum(axis=1).argsort()]:
        there = [tuple((np.array(one.place) + place - at) % scales.shape) for one in seen]
        fits = [_fits(one, float(scales[of])) for one, of in zip(seen, there, strict=True)]
        if len(seen) > 1 and _all(seen, fits):
            return f"they belong to other blocks: {seen[0].place} was made with the scale of {tuple(map(int, place))}"
    return ""


def _fits(one: Seen, scale: float) -> bool:
    return one.bounds[0] <= scale <= one.bounds[1]


def unswizzled(scales: numbers.Array) -> numbers.Array | None:
    """Return scales out of the tiles of 128x4 in which `_scaled_mm` wants those of MXFP8; None where they fill none."""
    rows, columns = scales.shape
    if rows % 128 or columns % 4:
        return None
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4).swapaxes(2, 3)
    return tiles.reshape(rows // 128, columns // 4, 128, 4).swapaxes(1, 2).reshape(rows, columns)
