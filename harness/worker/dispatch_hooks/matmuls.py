"""Hooks on both versions of `aten::_scaled_mm`, also in fused operators and generated code, and on the grouped matmuls
of experts, in high precision and both versions of the scaled one.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch

from harness.worker.dispatch_hooks.hook import install_hook

Tensor = torch.Tensor


class GroupedMM(NamedTuple):
    """One call: what was multiplied, and the scales that dequantize it where it is float8."""

    a: Tensor
    b: Tensor
    offs: Tensor | None  # the end of every group; None if both operands are 3D
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None

    @property
    def is_wgrad(self) -> bool:
        """Groups are along the contracted dim."""
        return self.a.dim() == self.b.dim() == 2

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of rows, or columns of `b`, of every group."""
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
grouped_observers: list[Callable[[GroupedMM], None]] = []


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> None:
    for observe in grouped_observers:
        observe(GroupedMM(a, b, offs))


def _grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None = None, *_: Any
) -> None:
    for observe in grouped_observers:
        observe(GroupedMM(a, b, offs, scale_a, scale_b))


def _grouped_scaled_v2(
    a: Tensor, b: Tensor, scale_a: list[Tensor], _: Any, __: Any, scale_b: list[Tensor], *others: Any
) -> None:
    """What the second version names beside is in the scales: their shape and dtype."""
    _grouped_scaled(a, b, scale_a[0], scale_b[0], *others[2:3])


# Called with (a, b, scale_a, scale_b) before every scaled matmul, and likewise.
scaled_observers: list[Callable[[Tensor, Tensor, Tensor, Tensor], None]] = []

# Called with (a, b, scale_a, scale_b, result) after every scaled matmul.
scaled_result_observers: list[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]] = []


def _before(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any, **__: Any) -> None:
    for observe in scaled_observers:
        observe(a, b, scale_a, scale_b)


def _after(result: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any, **__: Any) -> None:
    for observe in scaled_result_observers:
        observe(a, b, scale_a, scale_b, result)


def _first(
    a: Tensor, b: Tensor, scale_a: list[Tensor], _: object, __: object, scale_b: list[Tensor], *___: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the operands of the second version. Its other arguments follow from the shape and dtype of the scales."""
    return a, b, scale_a[0], scale_b[0]


def install() -> list[torch.library.Library]:
    aten = torch.ops.aten
    hooks = [
        install_hook(aten._grouped_mm.default, before=_grouped),
        install_hook(aten._scaled_grouped_mm.default, before=_grouped_scaled),
        install_hook(aten._scaled_grouped_mm_v2.default, before=_grouped_scaled_v2),
    ]
    for overload in ("default", "out"):
        hooks += [
            install_hook(getattr(aten._scaled_mm, overload), before=_before, after=_after),
            install_hook(
                getattr(aten._scaled_mm_v2, overload),
                before=lambda *args, **_: _before(*_first(*args)),
                after=lambda result, *args, **_: _after(result, *_first(*args)),
            ),
        ]
    return hooks


class ScaledMMCounter:
    """A context in which `calls` grows by one per executed scaled matmul."""

    def __init__(self) -> None:
        self.calls = 0

    def _observe(self, *_: Tensor) -> None:
        self.calls += 1

    def __enter__(self) -> Self:
        scaled_observers.append(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        scaled_observers.remove(self._observe)
