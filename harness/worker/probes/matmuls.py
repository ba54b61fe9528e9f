"""Counts the scaled matmuls that this rank really executes. Watches, changes nothing.

On the virtual device the kernel itself reports its calls, which holds for eager and compiled code alike. On CUDA a
dispatch mode sees them, in eager code only.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.worker.virtual import scaled_mm


class _DispatchCounter(TorchDispatchMode):
    def __init__(self, count: ScaledMMCounter) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # let the subclass unwrap itself: what it calls comes back here
        if func is torch.ops.aten._scaled_mm.default:
            self.count.calls += 1
        return func(*args, **(kwargs or {}))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ScaledMMCounter:
    """A context in which `calls` grows by one per executed scaled matmul. `dispatch` forces the CUDA way."""

    def __init__(self, device: torch.device, *, dispatch: bool = False) -> None:
        self.calls = 0
        self._mode = _DispatchCounter(self) if dispatch or device.type == "cuda" else None

    def _observe(self, *_: torch.Tensor) -> None:
        self.calls += 1

    def __enter__(self) -> Self:
        if self._mode is None:
            scaled_mm.observers.append(self._observe)
        else:
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None:
            scaled_mm.observers.remove(self._observe)
        else:
            self._mode.__exit__(kind, error, trace)
