"""Scales without their tensors: copied where they are seen, summarized after the step."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from harness.trace.operands import ScaleSummary
from harness.worker.probes.digests import bytes_of, fingerprint

Array = npt.NDArray[Any]

_NUMPY: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
# A positive power of two in float32: an exponent, between zero's and infinity's, and nothing else.
_NOT_EXPONENT, _EXPONENT_AT, _EXPONENT_BIAS, _INFINITY = np.uint32(0x807F_FFFF), 23, 127, 0x7F80_0000


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch."."""
    return str(dtype).removeprefix("torch.")


class Scale(NamedTuple):
    """All that is recorded of a scale depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes  # in the order of the indices

    def tensor(self) -> torch.Tensor:
        """The scale as a tensor on the host."""
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


def read_scale(scale: torch.Tensor) -> Scale:
    """The scale as it is now."""
    return Scale(tuple(scale.shape), scale.dtype, bytes_of(scale, transposed=False))


def summarize_scale(scale: torch.Tensor) -> ScaleSummary:
    """The scale without its values. An empty one has no minimum and no maximum: both are NaN."""
    return summary(read_scale(scale))


@functools.lru_cache(maxsize=1024)
def summary(scale: Scale) -> ScaleSummary:
    """What is recorded of a scale. That of a cast comes again with every matmul of its data."""
    values = _values(scale)
    return _summary_of_one(scale, float(values[0])) if values.size == 1 else _summary_of_rows(scale, values)


def _values(scale: Scale) -> Array:
    dtype = _NUMPY.get(scale.dtype)
    if dtype is not None:
        return np.frombuffer(scale.data, dtype)
    array: Array = scale.tensor().double().reshape(-1).numpy()
    return array


def _summary_of_one(scale: Scale, value: float) -> ScaleSummary:
    return ScaleSummary(
        shape=scale.shape,
        dtype=dtype_name(scale.dtype),
        minimum=value,
        maximum=value,
        total=value,
        log2_total=float(np.log2(value)) if 0 < value < math.inf else _log2_total(np.asarray(value)),
        digest=fingerprint(scale.data),
        power_of_two=math.frexp(value)[0] == 0.5,
    )


def _summary_of_rows(scale: Scale, values: Array) -> ScaleSummary:
    exponents = _exponent_total(values)
    return ScaleSummary(
        shape=scale.shape,
        dtype=dtype_name(scale.dtype),
        minimum=float(np.minimum.reduce(values)) if values.size else math.nan,
        maximum=float(np.maximum.reduce(values)) if values.size else math.nan,
        total=float(np.add.reduce(values, dtype=np.float64)),
        log2_total=_log2_total(values) if exponents is None else float(exponents),
        digest=fingerprint(scale.data),
        power_of_two=exponents is not None,
    )


def _exponent_total(values: Array) -> int | None:
    """The sum of the base-2 logarithms where every value is a power of two, None where one is not."""
    if values.dtype == np.float32 and values.size:
        words = values.view(np.uint32)
        alone = not np.bitwise_or.reduce(words) & _NOT_EXPONENT
        if alone and np.minimum.reduce(words) > 0 and np.maximum.reduce(words) < _INFINITY:
            return (int(np.add.reduce(words, dtype=np.uint64)) >> _EXPONENT_AT) - _EXPONENT_BIAS * values.size
    mantissas, exponents = np.frexp(values)
    return int(exponents.sum()) - values.size if (mantissas == 0.5).all() else None


def _log2_total(values: Array) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.log2(values, dtype=np.float64).sum())
