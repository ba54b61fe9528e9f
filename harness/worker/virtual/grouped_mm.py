"""The exact `aten::_grouped_mm` and `aten::_scaled_grouped_mm`, for any device: one matmul for each group of rows.

Every element depends on its row and column alone: not on the other rows, their number or their groups, nor on the order
of the contraction. What the stock kernel refuses is refused by it; offsets are refused with the words of the assertions
in the CUDA kernel. Rows behind the last group are NaN: a GPU leaves them as they were in memory. So is, in MXFP8, the
weight gradient of an empty group. Scales are of rows or of 32 values, and a group is computed as `_scaled_mm` would.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import DispatchKey, DispatchKeySet
from torch.nn.functional import ScalingType, SwizzleType

from harness.matrix.recipes import MX
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.virtual.grouped_rules import E8M0, refusals
from harness.worker.virtual.scaled_mm import block_product, operand
from harness.worker.virtual.scaled_rules import GPU, Operand

Tensor = torch.Tensor
_BITS = 18  # of a slice: sums of 2**17 products of two are exact in float64
_ALIGNED = "expected input tensor dynamic dimension byte size to be non-negative multiple of 16"


class Group(NamedTuple):
    """Views of one group."""

    number: int
    rows: slice  # of the dim that groups share: rows of a, columns of b, or what is contracted
    a: Tensor
    b: Tensor
    out: Tensor


def groups(a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor) -> Iterator[Group]:
    """The groups of [rows, k] x [groups, k, n], of [m, rows] x [rows, n], or of [groups, m, k] x [groups, k, n]."""
    ends = range(len(a) + 1) if offs is None else [0, *offs.tolist()]
    for index, (start, end) in enumerate(pairwise(ends)):
        rows = slice(start, end)
        if a.dim() == b.dim() == 2:
            yield Group(index, rows, a[:, rows], b[rows], out[index])
        elif a.dim() == b.dim():
            yield Group(index, rows, a[index], b[index], out[index])
        elif a.dim() == 2:
            yield Group(index, rows, a[rows], b[index], out[rows])
        else:
            yield Group(index, rows, a[index], b[:, rows], out[:, rows])


def require_offsets(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    """Raise RuntimeError with the text of the assertion in the CUDA kernel (GroupMMCommon.cuh) that would fail."""
    if offs is None:
        return
    ends = [0, *offs.tolist()]
    sizes = [end - start for start, end in pairwise(ends)]
    if min(sizes, default=0) < 0:
        raise RuntimeError("expected gemm dimension to be greater or equal 0")
    if ends[-1] > (a.shape[-1] if a.dim() == b.dim() else a.shape[0] if a.dim() == 2 else b.shape[1]):
        raise RuntimeError("expected offset to be less than tensor size")
    contracted = a.dim() == b.dim() and (a.stride(-1) == 1 or b.stride(-1) != 1)
    if (contracted or a.dim() > b.dim()) and any(size * a.itemsize % 16 for size in sizes[:-1]):
        raise RuntimeError(_ALIGNED)


def exact(key: str) -> Callable[..., Tensor]:
    """The kernel to put in the place of the stock one of this dispatch key, which still makes its checks and result."""
    stock = torch.library.get_kernel("aten::_grouped_mm", key)
    keys = DispatchKeySet(getattr(DispatchKey, key))

    def grouped_mm(
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        with unobserved():
            out: Tensor = stock.call_boxed(keys, a, b, None if offs is None else offs * 0, bias, out_dtype)
        if a.dtype == torch.bfloat16:  # others run one after another, without the CUDA kernel
            require_offsets(a, b, offs)
        out.fill_(math.nan)
        for group in groups(a, b, offs, out):
            group.out.copy_(exact_product(group.a, group.b))
        return out

    return grouped_mm


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in float64: the sum of products of slices, each of them exact, in a fixed order.

    A slice has the next 18 bits of every value, counted from the largest of its row of `a`, or column of `b`.
    Source: Ozaki et al., https://doi.org/10.1007/s11075-011-9478-1
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    finite = [torch.where(operand.isfinite(), operand, 0.0) for operand in (a, b)]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    of_b = list(_slices(finite[1], 0))
    with unobserved():
        for of_a in _slices(finite[0], 1):
            for slice_of_b in of_b:
                total += of_a @ slice_of_b
        if not (torch.equal(finite[0], a) and torch.equal(finite[1], b)):
            rounded = a @ b
            total = torch.where(rounded.isfinite(), total, rounded)
    return total


def _slices(rest: Tensor, dim: int) -> Iterator[Tensor]:
    while rest.any():
        _, exponent = torch.frexp(rest.abs().amax(dim, keepdim=True))
        shift = 1.5 * torch.exp2(exponent.to(torch.float64) + (52 - _BITS))
        part = (rest + shift) - shift
        yield part
        rest = rest - part


_ROWS = (ScalingType.RowWise.value, torch.float32)  # a recipe, and the dtype of its scales
_BLOCKS = (ScalingType.BlockWise1x32.value, E8M0)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Return `a @ b` of every group, dequantized, in bfloat16. Raises RuntimeError or ValueError where a GPU would.

    A scale is that of a row of `a`, or column of `b`, in a group; or e8m0 and of 32 values, in the order of
    `scaled_mm.unswizzled` group behind group, each padded to blocks of 128 by 4.
    """
    given = (a, b, scale_a, scale_b, offs, bias, scale_result)
    _require_allowed(tuple(None if tensor is None else operand(tensor) for tensor in given), out_dtype, GPU.capability)
    require_offsets(a, b, offs)
    count = () if a.dim() != b.dim() else (a.shape[0] if offs is None else len(offs),)
    shape = (*count, a.shape[-2], b.shape[-1])
    out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=a.device)
    parts = groups(a, b, offs, out)
    if scale_a.dtype == E8M0:
        products = _in_blocks(parts, scale_a, scale_b)
    elif a.dim() == b.dim() == 2:
        products = _in_rows(parts, scale_a.view(-1, a.shape[0]), scale_b.view(-1, b.shape[1]))
    else:
        products = _in_rows(parts, scale_a, scale_b)
    for group, product in products:
        group.out.copy_(product)
    return out


def _in_rows(parts: Iterator[Group], scale_a: Tensor, scale_b: Tensor) -> Iterator[tuple[Group, Tensor]]:
    for group in parts:
        with unobserved():
            product = group.a.to(torch.float64) @ group.b.to(torch.float64)
        of_a, of_b = (
            scale[group.number if scale.dim() == 2 else group.rows].to(torch.float64) for scale in (scale_a, scale_b)
        )
        yield group, product * (of_a[:, None] * of_b)


def _in_blocks(parts: Iterator[Group], scale_a: Tensor, scale_b: Tensor) -> Iterator[tuple[Group, Tensor]]:
    rest_a, rest_b = scale_a.flatten(), scale_b.flatten()
    for group in parts:
        size_a, size_b = _padded(group.a), _padded(group.b.t())
        if group.a.shape[1] % MX[1]:
            raise NotImplementedError("the virtual device multiplies whole blocks of 32 values along K in every group")
        if len(rest_a) < size_a or len(rest_b) < size_b:
            raise RuntimeError("scales end before the blocks of the last group: a GPU reads what is behind them")
        if group.a.numel():
            yield group, block_product(group.a, group.b, rest_a[:size_a], rest_b[:size_b])
        rest_a, rest_b = rest_a[size_a:], rest_b[size_b:]


def _padded(rows: Tensor) -> int:
    """Return the number of scales of these rows, padded to blocks of 128 by 4."""
    count, length = rows.shape
    return -(-count // 128) * 128 * -(-length // (4 * MX[1])) * 4


@functools.lru_cache(maxsize=4096)
def _require_allowed(
    given: tuple[Operand | None, ...], out_dtype: torch.dtype | None, capability: tuple[int, int] | None
) -> None:
    refused = next(refusals(given, out_dtype, capability), None)
    if refused is not None:
        raise refused.error(refused.text)


def scaled_grouped_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`scaled_grouped_mm` as `torch.nn.functional.scaled_grouped_mm` calls it, with scales of rows or of 32 values."""
    scalings = {
        (*recipe, *(tensor.dtype for tensor in scale)) for recipe, scale in ((recipe_a, scale_a), (recipe_b, scale_b))
    }
    if scalings not in ({_ROWS}, {_BLOCKS}):
        raise ValueError("No gemm implementation was found")
    if scalings == {_BLOCKS} and {*swizzle_a, *swizzle_b} != {SwizzleType.SWIZZLE_32_4_4.value}:
        raise ValueError("For CUDA MXFP8 grouped gemm, both scale swizzle types must be SWIZZLE_32_4_4")
    return scaled_grouped_mm(a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype)
