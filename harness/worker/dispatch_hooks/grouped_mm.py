"""Hooks on the grouped matmuls of experts, in high precision and both versions of the scaled one."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from harness.worker.dispatch_hooks.hook import install_hook

Tensor = torch.Tensor


class GroupedMM(NamedTuple):
    """One call: what was multiplied, and the scales that dequantize it where it is float8."""

    a: Tensor
    b: Tensor
    offs: Tensor | None  # the end of every group; None where both operands are 3D
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None

    @property
    def is_wgrad(self) -> bool:
        """Groups are along the contracted dim."""
        return self.a.dim() == self.b.dim() == 2

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows, or columns of `b`, of every group."""
        if self.offs is None:
            return (self.a.shape[1],) * len(self.a)
        return tuple(end - start for start, end in pairwise([0, *self.offs.tolist()]))

    @property
    def flops(self) -> int:
        """Of the rows in groups, not of those behind the last one."""
        others = (
            (len(self.a), self.b.shape[1]) if self.is_wgrad else (self.a if self.b.dim() == 2 else self.b).shape[-2:]
        )
        return 2 * sum(self.sizes) * math.prod(others)


# Called before every grouped matmul. Probes append themselves; they must not write to tensors.
observers: list[Callable[[GroupedMM], None]] = []


def _notify(call: GroupedMM) -> None:
    for observe in observers:
        observe(call)


def _plain(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> None:
    _notify(GroupedMM(a, b, offs))


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None = None, *_: Any) -> None:
    _notify(GroupedMM(a, b, offs, scale_a, scale_b))


def _scaled_v2(
    a: Tensor, b: Tensor, scale_a: list[Tensor], _: Any, __: Any, scale_b: list[Tensor], *others: Any
) -> None:
    """What the second version names beside is in the scales: their shape and dtype."""
    _scaled(a, b, scale_a[0], scale_b[0], *others[2:3])


def install() -> list[torch.library.Library]:
    return [
        install_hook(torch.ops.aten._grouped_mm.default, before=_plain),
        install_hook(torch.ops.aten._scaled_grouped_mm.default, before=_scaled),
        install_hook(torch.ops.aten._scaled_grouped_mm_v2.default, before=_scaled_v2),
    ]
