"""The matmuls of scaled blocks as TP ranks multiply them: for `tensor_ranks.ScaledProducts`."""

from collections.abc import Callable
from typing import Any

import torch

from harness.worker.one_rank.tensor_ranks import Cut, Matmul

Tensor = torch.Tensor


def _cutting_blocks(stock: Callable[..., Tensor], a: Any, b: Any, *rest: Any, **options: Any) -> Cut:
    """Of MXTensors: `a` has its scales as [m, blocks], `b` as [blocks, n]."""

    def cut(part: slice) -> Tensor:
        blocks = slice(part.start // a.block_size, part.stop // a.block_size)
        rows = _of_parts(a, a.qdata[:, part].contiguous(), a.scale[:, blocks].contiguous())
        columns = _of_parts(b, b.qdata[part].t().contiguous().t(), b.scale[blocks].t().contiguous().t())
        return stock(rows, columns, *rest, **options)

    return cut


def _of_parts(whole: Any, data: Tensor, scale: Tensor) -> Any:
    names, others = whole.__tensor_flatten__()
    parts = dict(zip(names, (data, scale), strict=True))
    return type(whole).__tensor_unflatten__(parts, others, data.shape, data.stride())


# By the kernel of a recipe.
MATMULS = {
    "mx": Matmul("torchao.prototype.mx_formats.mx_tensor", "_addmm_mx_dispatch", _cutting_blocks),
}
