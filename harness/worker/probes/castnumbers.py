"""The numbers of one cast to float8 and of its scale: what `harness/trace/operands.py` records, measured exactly.

Tensors are plain and local to this rank. They are read on the host: on a CPU without a copy, on a GPU with one.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # torch does not list it as exported

from harness.trace.operands import ScaleSummary
from harness.worker.probes.digests import digest, on_host

Array = npt.NDArray[Any]

EPS = 1e-12  # torchao clamps an amax below this: such a row has no amax * scale worth a rule
_ROUNDING = 1 + 2.0**-20  # a scale is rounded once, the product with it once more
_MAGNITUDE = np.uint8(0x7F)
_CPU_DEVICE = (1, 0)  # kDLCPU, the only one
_NONFINITE_FROM = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # magnitude bits of the first that is no number


class Cast(NamedTuple):
    """A cast that happened: high precision in, float8 bits and their scale out."""

    source: torch.Tensor
    bits: torch.Tensor
    scale: torch.Tensor
    axiswise_dim: int | None  # None: one scale for the tensor


class CastNumbers(NamedTuple):
    """The measured fields of a `CastRecord`, under their names there."""

    amax: float
    scaled_amax_minimum: float
    scaled_amax_maximum: float
    saturated: int
    flushed: int
    nonfinite: int
    mismatched: int
    elements: int
    data_digest: str


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch."."""
    return str(dtype).removeprefix("torch.")


def summarize_scale(scale: torch.Tensor) -> ScaleSummary:
    """The scale without its values. An empty one has no minimum and no maximum: both are NaN."""
    if scale.numel() == 1:
        return _summarize_single(tuple(scale.shape), scale.dtype, scale.item())
    return _summarize_rows(scale, digest(scale))


def _summarize_rows(scale: torch.Tensor, scale_digest: str) -> ScaleSummary:
    array = _array(scale)
    mantissas, exponents = np.frexp(array)
    powers = bool((mantissas == 0.5).all())
    return ScaleSummary(
        shape=tuple(scale.shape),
        dtype=dtype_name(scale.dtype),
        minimum=float(array.min()) if array.size else math.nan,
        maximum=float(array.max()) if array.size else math.nan,
        total=float(array.sum(dtype=np.float64)),
        log2_total=float(exponents.sum() - array.size) if powers else _log2_total(array),
        digest=scale_digest,
        power_of_two=powers,
    )


def _log2_total(array: Array) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.log2(array, dtype=np.float64).sum())


@functools.lru_cache(maxsize=1024)
def _summarize_single(shape: tuple[int, ...], dtype: torch.dtype, value: float) -> ScaleSummary:
    return ScaleSummary(
        shape=shape,
        dtype=dtype_name(dtype),
        minimum=value,
        maximum=value,
        total=value,
        log2_total=_log2_total(np.asarray(value)),
        digest=digest(torch.tensor(value, dtype=dtype)),
        power_of_two=math.frexp(value)[0] == 0.5,
    )


def _array(tensor: torch.Tensor) -> Array:
    """The values on the host, without a copy on a CPU, to be read only.

    Not through `Tensor.numpy`: that makes the storage not resizable, and FSDP2 frees a weight by resizing it.
    """
    array: Array = np.from_dlpack(_Exported(on_host(tensor)))
    return array


class _Exported:
    """A tensor on a CPU as numpy asks for it. `Tensor.__dlpack__` is several times as slow."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        return to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU_DEVICE


class CastMeter:
    """Measures casts and scales. One that repeats another of the same memory is recognized and not measured again.

    A tensor is cast two or three times in a step: for the forward and for both gradients, for the three projections
    of attention. The same storage, alive in between and at the same version, with the same bits as result, is the
    same cast.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[object, ...], tuple[StorageWeakRef, CastNumbers]] = {}
        self._scales: dict[tuple[object, ...], ScaleSummary] = {}

    def forget(self) -> None:
        """Take nothing for a repetition of what was measured before."""
        self._measured.clear()
        self._scales.clear()

    def summarize(self, scale: torch.Tensor) -> ScaleSummary:
        """The summary of a scale. That of a cast comes again with every matmul of its data."""
        if scale.numel() == 1:
            return summarize_scale(scale)
        key = (scale.shape, scale.dtype, scale_digest := digest(scale))
        if key not in self._scales:
            self._scales[key] = _summarize_rows(scale, scale_digest)
        return self._scales[key]

    def measure(self, cast: Cast, scale_digest: str) -> CastNumbers:
        """The numbers of one cast, whose scale has this digest."""
        data_digest = digest(cast.bits)
        source = StorageWeakRef(cast.source.untyped_storage())
        key = (
            source.cdata,
            cast.source._version,
            cast.source.storage_offset(),
            cast.bits.numel(),
            cast.bits.dtype,
            data_digest,
            scale_digest,
            cast.axiswise_dim,
        )
        known = self._measured.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        numbers = measure_cast(cast, data_digest)
        self._measured[key] = (source, numbers)
        return numbers


def measure_cast(cast: Cast, data_digest: str) -> CastNumbers:
    """Hold the bits, whose digest is `data_digest`, against what the source times the scale casts to."""
    original, bits, scale = on_host(cast.source), on_host(cast.bits), on_host(cast.scale)
    source = original.to(torch.float32)
    limit = torch.finfo(bits.dtype).max
    amax, lowest, highest = _amaxes(original if original.dtype == torch.float64 else source, scale, cast.axiswise_dim)
    # torchao 0.18, _ToFloat8ConstrFunc.forward: multiply in float32, clamp, cast.
    scaled = source * scale
    saturated = 0 if highest <= limit * _ROUNDING else int((scaled.abs() > limit * _ROUNDING).sum())
    expected = _array(scaled.clamp_(-limit, limit).to(bits.dtype).view(torch.uint8))
    found = _array(bits.view(torch.uint8))
    magnitudes = found & _MAGNITUDE
    return CastNumbers(
        amax=amax,
        scaled_amax_minimum=lowest,
        scaled_amax_maximum=highest,
        saturated=saturated,
        flushed=_flushed(_array(source), magnitudes),
        nonfinite=_nonfinite(magnitudes, _NONFINITE_FROM[bits.dtype]),
        mismatched=_mismatched(expected, found),
        elements=bits.numel(),
        data_digest=data_digest,
    )


def _amaxes(source: torch.Tensor, scale: torch.Tensor, axiswise_dim: int | None) -> tuple[float, float, float]:
    """The amax of all, and the smallest and largest amax * scale of a row. Rows of zeros are left out: 0 if all are."""
    if source.numel() == 0:
        return 0.0, 0.0, 0.0
    if axiswise_dim is None and scale.numel() == 1:
        values = _array(source)
        amax = max(float(values.max()), -float(values.min()))
        product = amax * scale.item() if not amax < EPS else 0.0
        return amax, product, product
    dim = -1 if axiswise_dim is None else axiswise_dim
    rows = _array(source.abs().amax(dim, keepdim=True).double())
    products = rows * _array(scale.double())
    usable = rows >= EPS
    if not usable.all():
        products = products[np.broadcast_to(usable, products.shape)]
    if products.size == 0:
        return float(rows.max()), 0.0, 0.0
    return float(rows.max()), float(products.min()), float(products.max())


def _flushed(source: Array, magnitudes: Array) -> int:
    if np.count_nonzero(magnitudes) == magnitudes.size:
        return 0
    return int(np.count_nonzero(source[magnitudes == 0]))


def _nonfinite(magnitudes: Array, first: int) -> int:
    if magnitudes.size == 0 or magnitudes.max() < first:
        return 0
    return int((magnitudes >= first).sum())


def _mismatched(expected: Array, found: Array) -> int:
    """Bytes that differ; a result of another shape is wrong in every element."""
    if expected.shape != found.shape:
        return max(expected.size, found.size)
    return int(np.count_nonzero(expected != found))
