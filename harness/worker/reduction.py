"""Numbers of one step over all ranks: the global loss and the global gradient norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.worker.virtual.collectives import unobserved


class Reduced(NamedTuple):
    """Numbers of one step over all ranks."""

    loss: float
    grad_norm: float


@unobserved()
@torch.no_grad()
def reduce_over_ranks(loss: torch.Tensor, model: nn.Module, tp: int) -> Reduced:
    """Global loss and gradient norm from one all-gather of (local loss, local sum of squares), summed in rank order.

    Every TP rank adds up the losses of its own position on the TP axis, so that TP ranks that disagree show.
    """
    mine = torch.stack([loss.double(), _squared_norm_share(model)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    return Reduced(loss=table[dist.get_rank() % tp :: tp, 0].sum().item(), grad_norm=table[:, 1].sum().sqrt().item())


def reduced_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient, distributed as its parameter is: those of norms arrive as partial sums."""
    grad = param.grad
    if isinstance(grad, DTensor):
        assert isinstance(param, DTensor), "a distributed gradient belongs to a distributed parameter"
        if grad.placements != param.placements:
            return grad.redistribute(placements=param.placements)
    return grad


def _squared_norm_share(model: nn.Module) -> torch.Tensor:
    """This rank's share of the squared gradient norm: what several ranks hold is divided among them."""
    world = dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for param in model.parameters():
        grad = reduced_gradient(param)
        if grad is None:
            continue
        shards = 1
        if isinstance(grad, DTensor):
            for axis, placement in enumerate(grad.placements):
                shards *= 1 if placement.is_replicate() else grad.device_mesh.size(axis)
            grad = grad.to_local()
        total += grad.double().square().sum() * (shards / world)
    return total
