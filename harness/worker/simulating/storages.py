"""The memory of fake tensors: every storage that is alive, by its size, and the most of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

_NOTICED = 1.01  # a peak is looked for again when the sum may be so much higher than the last one


class Storages:
    """All storages of floating-point tensors, and those of bytes, in which FSDP2 sends float8."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0  # of all that were noted; those that died count until the next look
        self.peak = 0

    def start(self) -> None:
        """A step begins."""
        self.peak = self.alive()

    def note(self, results: Any) -> None:
        """Results of an operator."""
        for tensor in tree_iter(results):
            if isinstance(tensor, torch.Tensor) and _counts(tensor):
                self.note_storage(tensor.untyped_storage())

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """A storage that is new, or that has another size now."""
        before = self._known.get(storage._cdata)
        size = storage.nbytes()
        if before is not None and before[1] == size:
            return
        self._known[storage._cdata] = (before[0] if before else StorageWeakRef(storage), size)
        self._sum += size - (before[1] if before else 0)
        if self._sum > _NOTICED * self.peak:
            self.peak = max(self.peak, self.alive())

    def alive(self) -> int:
        """Bytes of all that is alive now."""
        self._known = {at: known for at, known in self._known.items() if not known[0].expired()}
        self._sum = sum(size for _, size in self._known.values())
        return self._sum


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.uint8
