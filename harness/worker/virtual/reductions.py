"""PREMUL_SUM on a CPU: neither fabric can read the factor of it in a c10d operator, so tensors are scaled before.

FSDP2 asks for it wherever a gradient divide factor is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


def install() -> None:
    """Scale in the methods of every process group of this process."""
    group: Any = dist.ProcessGroup
    group.reduce_scatter_single = _scaled_reduce_scatter(group.reduce_scatter_single)
    group.allreduce = _scaled_allreduce(group.allreduce)


def _factor(op: Any) -> float | None:
    """The factor of a PREMUL_SUM reduction; None for other reductions."""
    if op != ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()
    assert isinstance(factor, float), f"PREMUL_SUM by a tensor is not supported, got {factor!r}"
    return factor


def _scaled_reduce_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.reduce_scatter_single` with PREMUL_SUM, whose factor the c10d operators cannot read."""

    def method(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        factor = _factor(options.reduceOp)
        if factor is not None:
            tensor = tensor if factor == 1.0 else tensor * factor
            options.reduceOp = ReduceOp.SUM
        return stock(group, output, tensor, options)

    return method


def _scaled_allreduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.allreduce` with PREMUL_SUM; scales in place, as allreduce does."""

    def method(group: Any, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is None:
            return stock(group, tensors)
        factor = _factor(options.reduceOp)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
            options.reduceOp = ReduceOp.SUM
        return stock(group, tensors, options)

    return method
