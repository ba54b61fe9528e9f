"""Hooks on both versions of `aten::_scaled_mm`: every scaled matmul, also in fused operators and generated code."""

from collections.abc import Callable
from typing import Any, Self

import torch

from harness.worker.dispatch_hooks.hook import install_hook

ScaledMMObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Called with (a, b, scale_a, scale_b) before every matmul. Probes append themselves; they must not write to tensors.
observers: list[ScaledMMObserver] = []

# Called with (a, b, scale_a, scale_b, result) after every matmul.
result_observers: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]] = []


def _before(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *_: Any, **__: Any) -> None:
    for observe in observers:
        observe(a, b, scale_a, scale_b)


def _after(
    result: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    for observe in result_observers:
        observe(a, b, scale_a, scale_b, result)


def _first(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    _: object,
    __: object,
    scale_b: list[torch.Tensor],
    *___: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of the second version. What it names beside is in the scales: their shape and dtype."""
    return a, b, scale_a[0], scale_b[0]


def install() -> list[torch.library.Library]:
    first, second = torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm_v2
    hooks = [install_hook(operator, before=_before, after=_after) for operator in (first.default, first.out)]
    hooks += [
        install_hook(
            operator,
            before=lambda *args, **_: _before(*_first(*args)),
            after=lambda result, *args, **_: _after(result, *_first(*args)),
        )
        for operator in (second.default, second.out)
    ]
    return hooks


class ScaledMMCounter:
    """A context in which `calls` grows by one per executed scaled matmul."""

    def __init__(self) -> None:
        self.calls = 0

    def _observe(self, *_: torch.Tensor) -> None:
        self.calls += 1

    def __enter__(self) -> Self:
        observers.append(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        observers.remove(self._observe)
