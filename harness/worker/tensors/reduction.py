"""What all ranks have of a number or a tensor, and the gradients of one step and their global norm."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.worker.dispatch_hooks.hook import unobserved

T = TypeVar("T")


@unobserved()
@torch.no_grad()
def gathered_copies(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """A copy of `tensor` of every rank of a group (default: all), in rank order. Hidden from the traffic probe."""
    copies = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(copies, tensor.contiguous(), group)
    return copies


@unobserved()
def with_other_ranks(mine: Mapping[str, T]) -> dict[str, T]:
    """Return what this rank has by name, and of names that it lacks what others have. All ranks must call it."""
    held: list[dict[str, T]] = [{}] * dist.get_world_size()
    dist.all_gather_object(held, dict(mine))
    return {name: value for of_rank in reversed(held) for name, value in of_rank.items()} | dict(mine)


def of_all_ranks(number: torch.Tensor) -> torch.Tensor:
    """Return the number of every rank in rank order: [world size]. For reporting; training does not read it."""
    return torch.cat(gathered_copies(number.reshape(1)))


def gradient_norm(squared_share: torch.Tensor) -> float:
    """Return the global gradient norm from the share of every rank, summed in rank order."""
    return of_all_ranks(squared_share).sum().sqrt().item()


_KEPT: list[dict[nn.Parameter, torch.Tensor]] = []


@contextlib.contextmanager
def reducing_once() -> Iterator[None]:
    """Gradients must not change in here: each is reduced once, however often it is asked for."""
    _KEPT.append({})
    try:
        yield
    finally:
        _KEPT.pop()


def reduced_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient, distributed as its parameter is: those of norms arrive as partial sums."""
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(param, DTensor), "a distributed gradient belongs to a distributed parameter"
    if grad.placements == param.placements:
        return grad
    kept = _KEPT[-1] if _KEPT else {}
    if param not in kept:
        kept[param] = grad.redistribute(placements=param.placements)
    return kept[param]


@unobserved()
@torch.no_grad()
def squared_norm_share(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64: what several ranks hold is divided among them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for param in parameters:
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


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|: infinite where only `expected` is zero, NaN where a value is not finite."""
    found, expected = found.double(), expected.double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return math.nan
    far, norm = (found - expected).norm().item(), expected.norm().item()
    return far / norm if norm else (math.inf if far else 0.0)
