"""When FSDP2 reduces gradients, on one rank that trains for several."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule


class GradientSync:
    """Whether a backward pass reduces gradients: as the target asks, and always the last one of a rank.

    While it is entered, it notes what the target asks of `FSDPModule.set_requires_gradient_sync`.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[FSDPModule, bool], bool] = {}
        self._stock = FSDPModule.set_requires_gradient_sync

    def __enter__(self) -> None:
        stock, asked = self._stock, self.asked

        def noted(module: FSDPModule, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            asked[module, recurse] = requires_gradient_sync
            stock(module, requires_gradient_sync, recurse=recurse)

        patched: Any = FSDPModule
        patched.set_requires_gradient_sync = noted

    def __exit__(self, *_: object) -> None:
        patched: Any = FSDPModule
        patched.set_requires_gradient_sync = self._stock

    def apply(self, *, last: bool) -> None:
        """Reduce in the next backward pass if it is the `last` one of a rank, otherwise as the target asked."""
        for (module, recurse), sync in self.asked.items():
            self._stock(module, sync or last, recurse=recurse)
