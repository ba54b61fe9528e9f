"""The numbers of one cast to float8, of its scale and its values: what `trace/operands.py` records, measured exactly.

Tensors are plain and local to this rank. They are read on the host: on a CPU without a copy, on a GPU with one.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # torch does not list it as exported

from harness.matrix.recipes import TENSOR, Block
from harness.trace.operands import ScaleSummary
from harness.worker.tensors.digests import bytes_of, fingerprint, is_transposed, on_host
from harness.worker.tensors.names import dtype_name

Array = npt.NDArray[Any]

_NUMPY: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
# A positive power of two in float32: an exponent, between zero's and infinity's, and nothing else.
_NOT_EXPONENT, _EXPONENT_AT, _EXPONENT_BIAS, _INFINITY = np.uint32(0x807F_FFFF), 23, 127, 0x7F80_0000


class Scale(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes  # in the order of the indices

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)


def read_scale(scale: torch.Tensor) -> Scale:
    return Scale(tuple(scale.shape), scale.dtype, bytes_of(scale, transposed=False))


def summarize_scale(scale: torch.Tensor) -> ScaleSummary:
    """Return the scale without its values. An empty one has no minimum and no maximum: both are NaN."""
    return summary(read_scale(scale))


@functools.lru_cache(maxsize=1024)
def summary(scale: Scale) -> ScaleSummary:
    """Return what is recorded of a scale. That of a cast comes again with every matmul of its data."""
    values = _values(scale)
    return ScaleSummary(
        shape=scale.shape,
        dtype=dtype_name(scale.dtype),
        digest=fingerprint(scale.data),
        **(_of_one(float(values[0])) if values.size == 1 else _of_rows(values)),
    )


def _values(scale: Scale) -> Array:
    dtype = _NUMPY.get(scale.dtype)
    if dtype is not None:
        return np.frombuffer(scale.data, dtype)
    array: Array = scale.tensor().float().double().reshape(-1).numpy()
    return array


def _of_one(value: float) -> dict[str, Any]:
    log2 = float(np.log2(value)) if 0 < value < math.inf else _log2_total(np.asarray(value))
    is_power = math.frexp(value)[0] == 0.5
    return {"minimum": value, "maximum": value, "total": value, "log2_total": log2, "power_of_two": is_power}


def _of_rows(values: Array) -> dict[str, Any]:
    exponents = _exponent_total(values)
    return {
        "minimum": float(np.minimum.reduce(values)) if values.size else math.nan,
        "maximum": float(np.maximum.reduce(values)) if values.size else math.nan,
        "total": float(np.add.reduce(values, dtype=np.float64)),
        "log2_total": _log2_total(values) if exponents is None else float(exponents),
        "power_of_two": exponents is not None,
    }


def _exponent_total(values: Array) -> int | None:
    """Return the sum of the base-2 logarithms where every value is a power of two, None if one is not."""
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


EPS = np.float64(1e-12)  # torchao clamps an amax below this: such a row has no amax * scale worth a rule
SMALLEST_BLOCK = np.float64(2.0**-118)  # blocks with a smaller amax share the scale 2**-127, the smallest of e8m0
_SMALLEST_SCALE = 2.0**-127
_ROUNDING = 1 + 2.0**-19  # the logarithm of a scale is rounded by up to this, a product by less
_MAGNITUDE = np.uint8(0x7F)
_CPU_DEVICE = (1, 0)  # kDLCPU, the only one
_NONFINITE_FROM = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # magnitude bits of the first that is NaN or Inf


class Cast(NamedTuple):
    """A cast that happened: high precision in, float8 bits and their scale out."""

    source: torch.Tensor
    bits: torch.Tensor
    scale: torch.Tensor
    axiswise_dim: int | None  # None: one scale for the tensor
    block: Block = TENSOR  # its length along that dim; where that is not all of it, the scale is the inverse
    rounds_down: bool = False  # the scales of blocks


class HostCast(NamedTuple):
    """All of a cast that its numbers depend on. It says of the bits what their content does not."""

    source: torch.Tensor  # on the host
    scale: Scale
    axiswise_dim: int | None
    data: bytes  # those of the content, which may be released before this is measured
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool  # the content is in the order of the transposed bits
    block: Block
    rounds_down: bool


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
    extreme_blocks: tuple[int, ...]


class _Products(NamedTuple):
    """The largest magnitude of all, and the smallest and largest of a row times its scale: 0 if all are zeros.

    `largest` is the largest value, where one scale spans the tensor. `places`: of the smallest and largest product.
    """

    amax: float
    lowest: float  # rows of zeros left out
    highest: float
    bound: float  # no row left out
    largest: float | None = None
    places: tuple[int, ...] = ()


def measure_cast(cast: Cast) -> CastNumbers:
    return measure(host_cast(cast, on_host(cast.source), read_scale(cast.scale), bytes_of(cast.bits)))


def host_cast(cast: Cast, source: torch.Tensor, scale: Scale, data: bytes) -> HostCast:
    """Return the same cast with its source, scale and bits as they were read."""
    bits, blocks = cast.bits, (cast.block, cast.rounds_down)
    return HostCast(source, scale, cast.axiswise_dim, data, bits.shape, bits.dtype, is_transposed(bits), *blocks)


def measure(cast: HostCast) -> CastNumbers:
    """Hold the bits against what the source times the scale casts to."""
    scale = cast.scale.tensor()
    widened = cast.source.to(torch.float32)
    if cast.block[1]:
        blocks = _blocks(widened, cast)
        factors = _factors(scale, blocks, cast)
        smallest = EPS if scale.dtype == torch.float32 else SMALLEST_BLOCK
        products, scale = _row_products(blocks, factors.reshape(-1, 1), -1, smallest), _spread(factors, cast)
    else:
        products = _products(cast.source if cast.source.dtype == torch.float64 else widened, scale, cast.axiswise_dim)
    limit = torch.finfo(cast.dtype).max
    # torchao 0.18, _ToFloat8ConstrFunc.forward: multiply in float32, clamp, cast.
    scaled = widened * scale
    saturated = 0 if products.highest <= limit * _ROUNDING else int((scaled.abs() > limit * _ROUNDING).sum())
    if not products.bound <= limit * _ROUNDING:  # below, the cast rounds to what the clamp would have made of it
        scaled.clamp_(-limit, limit)
    magnitudes = np.frombuffer(cast.data, np.uint8) & _MAGNITUDE
    return CastNumbers(
        amax=products.amax,
        scaled_amax_minimum=products.lowest,
        scaled_amax_maximum=products.highest,
        saturated=saturated,
        flushed=_flushed(widened, magnitudes, cast, products.amax),
        nonfinite=_nonfinite(magnitudes, _NONFINITE_FROM[cast.dtype]),
        mismatched=_mismatched(scaled.to(cast.dtype), cast),
        elements=cast.shape.numel(),
        largest=products.largest,
        extreme_blocks=products.places if cast.block[1] else (),
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


def _row_products(source: torch.Tensor, scale: torch.Tensor, dim: int, smallest: np.float64 = EPS) -> _Products:
    """A product that is NaN counts as the smallest and as the largest."""
    rows = _array(source.abs().amax(dim, keepdim=True))
    lowest = highest = np.multiply(rows, _array(scale), dtype=np.float64)
    amax, bound = float(np.maximum.reduce(rows, axis=None)), float(np.maximum.reduce(lowest, axis=None))
    if not np.minimum.reduce(rows, axis=None) >= smallest:
        usable = np.broadcast_to(rows >= smallest, lowest.shape)
        if not usable.any():
            return _Products(amax, 0.0, 0.0, bound)
        lowest, highest = np.where(usable, lowest, np.inf), np.where(usable, highest, -np.inf)
    places = int(lowest.argmin()), int(highest.argmax())
    return _Products(amax, float(lowest.flat[places[0]]), float(highest.flat[places[1]]), bound, places=places)


def _factors(scale: torch.Tensor, blocks: torch.Tensor, cast: HostCast) -> torch.Tensor:
    """What values of these blocks are multiplied by, exactly: the inverse of the scale, except two of torchao's.

    Of float32 only the inverse is recorded, and the factor of the amax is the one where it has that inverse.

    torchao 0.18, `to_mx`: rounding down, blocks with the smallest scale are divided by the smallest normal number, and
    those with a NaN by infinity; rounding up, blocks with the smallest scale stay as they are.
    """
    if scale.dtype == torch.float32:
        amax = blocks.abs().amax(-1).clamp(min=float(EPS)).double().view(scale.shape)
        right = (torch.finfo(cast.dtype).max / amax).float()
        return torch.where(right.reciprocal() == scale, right, scale.reciprocal())
    exact = scale.double()
    factors = torch.where(exact == _SMALLEST_SCALE, 2.0**126 if cast.rounds_down else 1.0, exact.reciprocal())
    return (factors.nan_to_num(0.0) if cast.rounds_down else factors).float()


def _blocks(source: torch.Tensor, cast: HostCast) -> torch.Tensor:
    """Return the values [blocks, values of one], in the order of scales."""
    (rows, length), lines = cast.block, source if cast.axiswise_dim == -1 else source.t()
    return lines.reshape(-1, rows, lines.shape[-1] // length, length).transpose(1, 2).reshape(-1, rows * length)


def _spread(factors: torch.Tensor, cast: HostCast) -> torch.Tensor:
    """Return the factor of every value of the source."""
    rows, length = cast.block
    spread = factors.repeat_interleave(length, -1)
    spread = spread if rows == 1 else spread.repeat_interleave(rows, 0)
    return spread if cast.axiswise_dim == -1 else spread.t()


_CANCELLED = 2.0**-40  # of the amax in float64: below are sums whose terms cancel, and zero in another order


def _flushed(source: torch.Tensor, magnitudes: Array, cast: HostCast, amax: float) -> int:
    if np.count_nonzero(magnitudes) == magnitudes.size:
        return 0
    values = _array((source.t() if cast.transposed else source).contiguous()).reshape(-1)[magnitudes == 0]
    if cast.source.dtype == torch.float64:
        return int(np.count_nonzero(np.abs(values) > _CANCELLED * amax))
    return int(np.count_nonzero(values))


def _nonfinite(magnitudes: Array, first: int) -> int:
    if magnitudes.size == 0 or np.maximum.reduce(magnitudes) < first:
        return 0
    return int((magnitudes >= first).sum())


def _mismatched(expected: torch.Tensor, cast: HostCast) -> int:
    """Return the bytes that differ; a result of another shape is wrong in every element."""
    if expected.shape != cast.shape:
        return max(expected.numel(), cast.shape.numel())
    right, found = bytes_of(expected, transposed=cast.transposed), cast.data
    if right == found:
        return 0
    return int(np.count_nonzero(np.frombuffer(right, np.uint8) != np.frombuffer(found, np.uint8)))


def _array(tensor: torch.Tensor) -> Array:
    """Return the values on the host, without a copy on a CPU, to be read only.

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
