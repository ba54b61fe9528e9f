"""Measures what autograd keeps for the backward pass. See `SavedMemory` in `harness/trace/counts.py`.

Saved-tensor hooks see every tensor that a node saves, except inside a checkpointed region, whose own hooks come first:
of that they see the inputs, which is what checkpointing keeps. What selective checkpointing keeps besides, outputs of
chosen operators, it keeps in a table of its own, whose entries are watched as they are made.

Weighed is what is alive when backward asks for the first saved tensor: a storage counts once, with all its bytes, and
one that FSDP2 has emptied counts nothing. Tokens and labels are not counted: they are data, not activations.

What is kept in other ways is in the census (`live_memory.py`), taken at that moment and at the end of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.utils.checkpoint
from msgspec.structs import replace
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from harness.matrix.case import Case
from harness.trace.counts import SavedMemory
from harness.worker.probes.live_memory import Census, plain_tensors
from harness.worker.probes.probe import Probe


class SavedMemoryProbe(Probe):
    """Records one `SavedMemory` a step, of its first forward pass."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._model: nn.Module | None = None
        self._seen: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._recording = False
        self._hooks = ExitStack()
        self._weighed: list[SavedMemory] = []
        self._census = Census()

    def install(self) -> None:
        """Watch what selective checkpointing keeps, and take part in the census."""
        cached = torch.utils.checkpoint._VersionWrapper
        self.replace(torch.utils.checkpoint, "_VersionWrapper", _watching(cached, self._note))
        self._installed.callback(self._census.install())
        self._installed.callback(self._hooks.close)

    def attach(self, model: nn.Module) -> None:
        self._model = model
        self._census.attach(model)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._recording = True
        self._hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor)
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._recording:
            self._measure()
        return tensor

    def _note(self, tensor: torch.Tensor) -> None:
        if self._recording:
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                known = self._seen.get(storage._cdata)  # no other storage, for a weak reference keeps the address
                self._seen[storage._cdata] = (known[0] if known else StorageWeakRef(storage), plain.dtype)

    def _measure(self) -> None:
        self._recording = False
        assert self._model is not None, "attach comes before the first step"
        state = chain(self._model.parameters(), self._model.buffers())
        kept = {plain.untyped_storage()._cdata for tensor in state for plain in plain_tensors(tensor)}
        by_dtype: Counter[str] = Counter()
        for pointer, (weak, dtype) in self._seen.items():
            if dtype.is_floating_point and pointer not in kept and not weak.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
                by_dtype[str(dtype).removeprefix("torch.")] += storage.nbytes()
        live = self._census.take("forward", saved=(weak for weak, _ in self._seen.values()))
        self._seen.clear()
        self._weighed.append(
            SavedMemory(
                step=self._step,
                saved_bytes=by_dtype.total(),
                float8_bytes=sum(count for dtype, count in by_dtype.items() if dtype.startswith("float8")),
                by_dtype=dict(sorted((dtype, count) for dtype, count in by_dtype.items() if count)),
                live=(live,),
            )
        )

    def after_backward(self, model: nn.Module) -> None:
        self._hooks.close()
        self._recording = False

    def after_update(self, model: nn.Module) -> None:
        if self._weighed and self._weighed[-1].step == self._step:
            weighed = self._weighed[-1]
            self._weighed[-1] = replace(weighed, live=(*weighed.live, self._census.take("step")))

    def result(self) -> tuple[SavedMemory, ...]:
        """One record for every step that ran a backward pass."""
        return tuple(self._weighed)


def _watching(cached: type[Any], note: Callable[[torch.Tensor], None]) -> type[Any]:
    """A subclass of selective checkpointing's cache entry that calls `note` for every tensor it is created for."""

    class Watched(cached):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            if isinstance(value, torch.Tensor):
                note(value)

    return Watched
