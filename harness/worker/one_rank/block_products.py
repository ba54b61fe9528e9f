"""The matmuls of scaled blocks as TP ranks multiply them: for `module_ranks.FirstMatmul`."""

from collections.abc import Callable
from typing import Any

import torch

from harness.matrix.recipes import SLICE
from harness.worker.one_rank.module_ranks import Matmul, Part

Tensor = torch.Tensor


def _cutting_blocks(stock: Callable[..., Tensor], a: Any, b: Any, *rest: Any, **options: Any) -> Part:
    """Of MXTensors: `a` has its scales as [m, blocks], `b` as [blocks, n]."""

    def multiply(part: slice) -> Tensor:
        blocks = slice(part.start // a.block_size, part.stop // a.block_size)
        rows = _of_parts(a, a.qdata[:, part].contiguous(), a.scale[:, blocks].contiguous())
        columns = _of_parts(b, b.qdata[part].t().contiguous().t(), b.scale[blocks].t().contiguous().t())
        return stock(rows, columns, *rest, **options)

    return multiply


def _of_parts(tensor: Any, data: Tensor, scale: Tensor) -> Any:
    names, others = tensor.__tensor_flatten__()
    parts = dict(zip(names, (data, scale), strict=True))
    return type(tensor).__tensor_unflatten__(parts, others, data.shape, data.stride())


def _cutting_scales(
    stock: Callable[..., Tensor], a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, *rest: Any
) -> Part:
    """Of operands with a scale for 128 values: `b` has its scales as [blocks, blocks of n], or as [n, blocks]."""

    def multiply(part: slice) -> Tensor:
        blocks = slice(part.start // SLICE[1], part.stop // SLICE[1])
        of_b = scale_b[:, blocks] if len(scale_b) == b.shape[1] else scale_b[blocks].t().contiguous().t()
        rows, columns = a[:, part].contiguous(), b[part].t().contiguous().t()
        return stock(rows, columns, scale_a[:, blocks], recipe_a, of_b, *rest)

    return multiply


# By the kernel of a recipe.
MATMULS: dict[str, Matmul] = {
    "mx": ("torchao.prototype.mx_formats.mx_tensor", "_addmm_mx_dispatch", _cutting_blocks),
    "blockwise": ("torchao.prototype.blockwise_fp8_training.linear", "_scaled_mm", _cutting_scales),
}
