"""Numbers of 8 and 16 bits without torch: what their bits mean, how far apart they are, how a value is rounded to them.

Dtypes go by their names in safetensors. Values are float32 where that holds them all, and float64 else.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class Float(NamedTuple):
    """A float of few bits: how many its mantissa has, the smallest exponent of a normal number, the largest value."""

    mantissa: int
    least: int
    largest: float


FLOATS: Mapping[str, Float] = {
    "F8_E4M3": Float(3, -6, 448.0),
    "F8_E4M3FNUZ": Float(3, -7, 240.0),
    "F8_E5M2": Float(2, -14, 57344.0),
    "BF16": Float(7, -126, 3.3895313892515355e38),
    "F16": Float(10, -14, 65504.0),
    "F32": Float(23, -126, 3.4028234663852886e38),
}
# By dtype: the numbers of numpy that hold its bits.
STORAGE: Mapping[str, str] = {
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E8M0", "U8", "BOOL"), "u1"),
    "BF16": "<u2",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I8": "i1",
    **{f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (16, 32, 64)},
}
# As torch calls them.
OF_TORCH: Mapping[str, str] = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "uint8": "U8",
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
}
TORCH_NAMES: Mapping[str, str] = {dtype: name for name, dtype in OF_TORCH.items()}
QUANTIZED = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2")


def decoded(raw: Array, dtype: str) -> Array:
    """Return the values of what is stored as this dtype."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E8M0"):
        return table(dtype)[raw]
    return raw.astype(np.float32 if dtype in ("F16", "F32") else np.float64)


def decoded_scale(raw: Array, dtype: str) -> Array:
    """Return scales; those of bytes are exponents."""
    return decoded(raw, "F8_E8M0" if dtype == "U8" else dtype).astype(np.float64)


@functools.cache
def table(dtype: str) -> Array:
    """Return the value of each byte, all of which float32 has."""
    return _values(dtype).astype(np.float32)


def _values(dtype: str) -> Array:
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        return np.asarray(np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)))
    mantissa, least, _ = FLOATS[dtype]
    exponent, fraction = (codes & 127) >> mantissa, codes & ((1 << mantissa) - 1)
    normal = np.ldexp((1 << mantissa) + fraction, least - mantissa + np.maximum(exponent, 1) - 1)
    values = np.where(exponent > 0, normal, np.ldexp(fraction.astype(np.float64), least - mantissa))
    values = np.where(codes & 128, -values, values)
    if dtype == "F8_E4M3":
        values[[127, 255]] = np.nan
    elif dtype == "F8_E4M3FNUZ":
        values[128] = np.nan
    else:
        infinite = exponent == 31
        values = np.where(infinite, np.where(fraction > 0, np.nan, np.copysign(np.inf, values)), values)
    return np.asarray(values)


def quantum(values: Array, dtype: str) -> Array:
    """Return how far apart the numbers of a dtype are around each value."""
    mantissa, least, _ = FLOATS[dtype]
    return np.asarray(np.ldexp(1.0, np.maximum(np.frexp(values)[1] - 1, least) - mantissa))


def rounded(values: Array, dtype: str) -> Array:
    """Return the nearest numbers of a dtype, the even one of two; float8 saturates, and wider ones overflow."""
    if dtype not in FLOATS:
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        values = values.astype(np.float32) if dtype in ("BF16", "F16") else values  # torch casts float64 by way of it
        if dtype in ("F16", "F32"):
            return np.asarray(values.astype(STORAGE[dtype]).astype(np.float64))
        step = quantum(values, dtype)
        near, largest = np.rint(values / step) * step, FLOATS[dtype].largest
        if dtype in QUANTIZED:
            return np.asarray(np.clip(near, -largest, largest))
        return np.asarray(np.where(np.abs(near) > largest, np.copysign(np.inf, near), near))


def is_power_of_two(scales: Array) -> Array:
    """Return True for each power of two."""
    return np.asarray(np.frexp(scales)[0] == 0.5)


def over_blocks(reduce: Any, values: Array, block: tuple[int, int]) -> Array:
    """Return a ufunc over each block of a matrix, np.maximum or np.add; blocks at the end may be smaller."""
    (rows, columns), (height, width) = values.shape, (block[0] or values.shape[0], block[1] or values.shape[1])
    if rows % height == 0 and columns % width == 0:
        apart = values.reshape(rows // height, height, columns // width, width)
        return np.asarray(reduce.reduce(reduce.reduce(apart, axis=3), axis=1))
    across = reduce.reduceat(values, np.arange(0, columns, width), axis=1)
    return np.asarray(reduce.reduceat(across, np.arange(0, rows, height), axis=0))


def with_scales(operator: Any, values: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return np.multiply or np.divide of each value of a matrix and the scale of its block."""
    (rows, columns), (height, width) = values.shape, (block[0] or values.shape[0], block[1] or values.shape[1])
    if rows % height == 0 and columns % width == 0:
        apart = values.reshape(rows // height, height, columns // width, width)
        return np.asarray(operator(apart, scales[:, None, :, None])).reshape(rows, columns)
    wide = np.repeat(np.repeat(scales, width, axis=1)[:, :columns], height, axis=0)[:rows]
    return np.asarray(operator(values, wide))
