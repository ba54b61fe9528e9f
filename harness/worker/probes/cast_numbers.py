"""The numbers of one cast to float8: what `harness/trace/operands.py` records, measured exactly.

Tensors are plain and local to this rank. They are read on the host: on a CPU without a copy, on a GPU with one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # torch does not list it as exported

from harness.worker.probes.contents import Content
from harness.worker.probes.digests import bytes_of, is_transposed, on_host
from harness.worker.probes.scales import Scale, read_scale

Array = npt.NDArray[Any]

EPS = np.float64(1e-12)  # torchao clamps an amax below this: such a row has no amax * scale worth a rule
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


class HostCast(NamedTuple):
    """All of a cast that its numbers depend on. It says of the bits what their content does not."""

    source: torch.Tensor  # on the host
    scale: Scale
    axiswise_dim: int | None
    content: Content
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool  # the content is in the order of the transposed bits


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
    largest: float | None


class _Products(NamedTuple):
    """The largest magnitude of all, and the smallest and largest of a row times its scale: 0 if all are zeros.

    `largest` is the largest value, where one scale spans the tensor.
    """

    amax: float
    lowest: float  # rows of zeros left out
    highest: float
    bound: float  # no row left out
    largest: float | None = None


def measure_cast(cast: Cast) -> CastNumbers:
    """The numbers of a cast, now."""
    return measure(host_cast(cast, on_host(cast.source), read_scale(cast.scale), Content(bytes_of(cast.bits))))


def host_cast(cast: Cast, source: torch.Tensor, scale: Scale, content: Content) -> HostCast:
    """The same cast with its source, scale and bits as they were read."""
    bits = cast.bits
    return HostCast(source, scale, cast.axiswise_dim, content, bits.shape, bits.dtype, is_transposed(bits))


def measure(cast: HostCast) -> CastNumbers:
    """Hold the bits against what the source times the scale casts to."""
    scale = cast.scale.tensor()
    widened = cast.source.to(torch.float32)
    products = _products(cast.source if cast.source.dtype == torch.float64 else widened, scale, cast.axiswise_dim)
    limit = torch.finfo(cast.dtype).max
    # torchao 0.18, _ToFloat8ConstrFunc.forward: multiply in float32, clamp, cast.
    scaled = widened * scale
    saturated = 0 if products.highest <= limit * _ROUNDING else int((scaled.abs() > limit * _ROUNDING).sum())
    if not products.bound <= limit * _ROUNDING:  # below, the cast rounds to what the clamp would have made of it
        scaled.clamp_(-limit, limit)
    magnitudes = np.frombuffer(cast.content.data, np.uint8) & _MAGNITUDE
    return CastNumbers(
        amax=products.amax,
        scaled_amax_minimum=products.lowest,
        scaled_amax_maximum=products.highest,
        saturated=saturated,
        flushed=_flushed(widened, magnitudes, transposed=cast.transposed),
        nonfinite=_nonfinite(magnitudes, _NONFINITE_FROM[cast.dtype]),
        mismatched=_mismatched(scaled.to(cast.dtype), cast),
        elements=cast.shape.numel(),
        largest=products.largest,
    )


def _products(source: torch.Tensor, scale: torch.Tensor, axiswise_dim: int | None) -> _Products:
    if source.numel() == 0:
        return _Products(0.0, 0.0, 0.0, 0.0)
    if axiswise_dim is None and scale.numel() == 1:
        values = _array(source)
        largest = float(np.maximum.reduce(values, axis=None))
        amax = max(largest, -float(np.minimum.reduce(values, axis=None)))
        bound = amax * scale.item()
        product = bound if not amax < EPS else 0.0
        return _Products(amax, product, product, bound, largest)
    return _row_products(source, scale, -1 if axiswise_dim is None else axiswise_dim)


def _row_products(source: torch.Tensor, scale: torch.Tensor, dim: int) -> _Products:
    rows = _array(source.abs().amax(dim, keepdim=True))
    products = np.multiply(rows, _array(scale), dtype=np.float64)
    amax, bound = float(np.maximum.reduce(rows, axis=None)), float(np.maximum.reduce(products, axis=None))
    if np.minimum.reduce(rows, axis=None) >= EPS:
        return _Products(amax, float(np.minimum.reduce(products, axis=None)), bound, bound)
    usable = products[np.broadcast_to(rows >= EPS, products.shape)]
    if usable.size == 0:
        return _Products(amax, 0.0, 0.0, bound)
    return _Products(amax, float(usable.min()), float(usable.max()), bound)


def _flushed(source: torch.Tensor, magnitudes: Array, *, transposed: bool) -> int:
    if np.count_nonzero(magnitudes) == magnitudes.size:
        return 0
    values = _array((source.t() if transposed else source).contiguous()).reshape(-1)
    return int(np.count_nonzero(values[magnitudes == 0]))


def _nonfinite(magnitudes: Array, first: int) -> int:
    if magnitudes.size == 0 or np.maximum.reduce(magnitudes) < first:
        return 0
    return int((magnitudes >= first).sum())


def _mismatched(expected: torch.Tensor, cast: HostCast) -> int:
    """Bytes that differ; a result of another shape is wrong in every element."""
    if expected.shape != cast.shape:
        return max(expected.numel(), cast.shape.numel())
    right, found = bytes_of(expected, transposed=cast.transposed), cast.content.data
    if right == found:
        return 0
    return int(np.count_nonzero(np.frombuffer(right, np.uint8) != np.frombuffer(found, np.uint8)))


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
