"""Sums of what several ranks have, as the virtual device adds them up, and how far a tensor is from what it must be."""

import math
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # sums are rounded once, as by the virtual device


def summed(parts: torch.Tensor) -> torch.Tensor:
    """The sum of `parts` [ranks, ...] in rank order, rounded once, as the virtual device has it."""
    first, *others = parts
    total = first.to(WIDE.get(parts.dtype, parts.dtype), copy=True)
    for part in others:
        total += part
    return total.to(parts.dtype)


class KeepsParts(Protocol):
    def add(self, parts: Tensor) -> None:
        """Keep what each rank has of a gradient: [ranks, ...]."""


class Spread(torch.autograd.Function):
    """The same tensor for every rank: [ranks, ...]. Its gradient is the sum of theirs, of each over readers first."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int, kept: KeepsParts | None) -> Tensor:
        ctx.kept = kept
        return whole.expand(ranks, *whole.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.kept is not None:
            ctx.kept.add(grads[0])
        return summed(grads[0]), None, None


def spread(whole: Tensor, ranks: int, kept: KeepsParts | None = None) -> Tensor:
    copies: Tensor = Spread.apply(whole, ranks, kept)
    return copies


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|: infinite where only `expected` is zero, NaN where a value is not finite."""
    found, expected = found.double(), expected.double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return math.nan
    far, norm = (found - expected).norm().item(), expected.norm().item()
    return far / norm if norm else (math.inf if far else 0.0)
