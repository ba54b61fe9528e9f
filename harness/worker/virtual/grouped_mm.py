"""The exact `aten::_grouped_mm`, for any device: one matmul for each group of rows, as experts of a model multiply.

Every element depends on its row and column alone: not on the other rows, their number or their groups, nor on the order
of the contraction. What the stock kernel refuses is refused by it; offsets are refused with the words of the assertions
in the CUDA kernel. Rows behind the last group are NaN: a GPU leaves them as they were in memory.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import DispatchKey, DispatchKeySet

from harness.worker.dispatch_hooks.hook import unobserved

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
    """Raises RuntimeError with the text of the assertion in the CUDA kernel (GroupMMCommon.cuh) that would fail."""
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
