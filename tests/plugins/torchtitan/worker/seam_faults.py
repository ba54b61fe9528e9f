"""Faults of torchtitan's clipping and of its fused projection: ranks call one before the Trainer is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils
from torchtitan.models.common.attention import FusedQKVLinear

Tensor = torch.Tensor


def _clipped(change: Callable[..., Tensor]) -> None:
    """Replace torchtitan's clipping by `change(stock, parameters, max_norm, options)`."""
    stock = utils.clip_grad_norm_
    utils.clip_grad_norm_ = lambda parameters, max_norm, **options: change(stock, list(parameters), max_norm, options)


def norm_of_own_shards() -> None:
    """Every rank clips by the norm of what it has."""

    def clip(_: Any, parameters: list[Tensor], max_norm: float, __: Any) -> Tensor:
        grads = [param.grad for param in parameters if param.grad is not None]
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        norm = torch.nn.utils.get_total_norm(own)
        for grad in own:
            grad.mul_((max_norm / norm).clamp(max=1))
        return norm

    _clipped(clip)


def norm_of_own_stage() -> None:
    """Every stage of a pipeline clips by its own norm."""
    _clipped(lambda stock, parameters, limit, options: stock(parameters, limit, **options | {"pp_mesh": None}))


def experts_not_clipped() -> None:
    def clip(stock: Any, parameters: list[Tensor], limit: float, options: Any) -> Tensor:
        norm: Tensor = stock(parameters, limit, **options)
        for param in parameters:
            if param.dim() == 3 and param.grad is not None:
                param.grad.mul_(norm / limit)
        return norm

    _clipped(clip)


def _projected(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
    """Replace the queries, keys and values of odd ranks."""
    stock = FusedQKVLinear.forward

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = stock(self, x)
        return change(*results) if dist.get_rank() % 2 else results

    FusedQKVLinear.forward = forward


def keys_and_values_swapped() -> None:
    _projected(lambda q, k, v: (q, v, k))


def queries_of_another_group() -> None:
    """As where a rank has rows of the fused weight by part, not by group of heads."""
    _projected(lambda q, k, v: (q.roll(1, 1), k, v))
