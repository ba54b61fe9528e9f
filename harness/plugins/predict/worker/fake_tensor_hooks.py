"""A dispatch mode that notifies the observers of fake tensors, under which the kernels with dispatcher hooks never run.

It is below tensor subclasses and above fake tensors: it sees the operators of one rank, with the shapes of its shards.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from harness.trace.counts import SimulatedMatmul
from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.hook import HOOKS, observed, unobserved
from harness.worker.dispatch_hooks.products import precision_of
from harness.worker.virtual.scaled_mm import require_allowed

_NOTICED = 1.01  # a peak is looked for again when the sum may be so much higher than the last one


class Storages:
    """All storages of floating-point tensors, and those of bytes, in which FSDP2 sends float8."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0  # of all that were noted; those that died count until the next look
        self.peak = 0

    def start(self) -> None:
        self.peak = self.alive()

    def note(self, results: Any) -> None:
        for tensor in tree_iter(results):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.dtype == torch.uint8):
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
        self._known = {at: known for at, known in self._known.items() if not known[0].expired()}
        self._sum = sum(size for _, size in self._known.values())
        return self._sum


_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_MATMULS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten._scaled_mm.default: 0}

# Functional collectives call those of c10d in kernels, which fake tensors have none of: kind, and whether it reduces.
_FUNCTIONAL = {
    _functional.all_gather_into_tensor.default: ("all_gather", False),
    _functional.reduce_scatter_tensor.default: ("reduce_scatter", True),
    _functional.all_reduce.default: ("all_reduce", True),
    _functional.all_reduce_.default: ("all_reduce", True),
    _functional.all_to_all_single.default: ("all_to_all", False),
}


class FakeTensorHooks(TorchDispatchMode):
    """Notifies the observers of all hooks, counts matmuls by shape, and notes every result in `storages`.

    Raises RuntimeError for a scaled matmul that a GPU refuses, with its message.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self._matmuls: Counter[tuple[str, int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented
        if not observed():
            return func(*args, **(kwargs or {}))
        self._notify(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self._storages.note(result)
        return result

    def _notify(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is _aten._scaled_mm.default:
            with _disable_current_modes():
                require_allowed(*args, **kwargs)
        if func in _MATMULS:
            first, second = args[_MATMULS[func] : _MATMULS[func] + 2]
            self._matmuls[precision_of(first.dtype), first.shape[0], second.shape[1], first.shape[1]] += 1
        if func in HOOKS:
            HOOKS[func](*args, **kwargs)
        elif func in _FUNCTIONAL:
            _tell_functional(func, args)

    def start(self) -> None:
        self._matmuls.clear()

    def matmuls(self) -> tuple[SimulatedMatmul, ...]:
        return tuple(
            SimulatedMatmul(precision=precision, m=m, n=n, k=k, calls=calls)
            for (precision, m, n, k), calls in sorted(self._matmuls.items())
        )


def _tell_functional(func: Any, args: Any) -> None:
    kind, reduces = _FUNCTIONAL[func]
    tensor, group = args[0], collectives.resolve_group(args[-1])
    collectives.notify(kind, args[1] if reduces else "", tensor.dtype, tensor.numel(), group)


def silent_propagation() -> Callable[..., Any]:
    """DTensor's propagation of shapes, unobserved: under a fake mode it runs the operators of whole tensors in it."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def silent(*args: Any, **kwargs: Any) -> Any:
        with unobserved():
            return propagate(*args, **kwargs)

    return silent
