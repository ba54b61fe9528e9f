"""Counts the scaled matmuls that this rank really executes, in eager and compiled code. Watches, changes nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from harness.worker.dispatch_hooks import scaled_mm


class ScaledMMCounter:
    """A context in which `calls` grows by one per executed scaled matmul."""

    def __init__(self) -> None:
        self.calls = 0

    def _observe(self, *_: torch.Tensor) -> None:
        self.calls += 1

    def __enter__(self) -> Self:
        scaled_mm.observers.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scaled_mm.observers.remove(self._observe)
