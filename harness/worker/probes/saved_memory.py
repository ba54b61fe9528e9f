"""Measures what autograd keeps for the backward pass, and what else is alive. See `SavedMemory` in `trace/counts.py`.

Saved-tensor hooks see every tensor that a node saves, except inside a checkpointed region, whose own hooks come first:
of that they see the inputs, which is what checkpointing keeps. What selective checkpointing keeps besides, outputs of
chosen operators, it keeps in its own table, whose entries are watched as they are made.

Weighed is what is alive when backward asks for the first saved tensor: a storage counts once, with all its bytes, and
one that FSDP2 has emptied counts nothing. Tokens and labels are not counted: they are data, not activations.

Saved-tensor hooks do not see what a module, a closure or a cache keeps. That is in the census, taken at that moment and
at the end of the step: Python lists every tensor object of this rank (`gc.get_objects`), and every storage that is not
explained is recorded. It is explained by a parameter, a buffer, the optimizer, the data, the harness, or, before
backward, by autograd. Of a parameter that FSDP2 manages only the shard explains: the gathered weight is recorded while
it has memory. The census keeps no tensor alive, and within a step never collects garbage: a tensor in a reference
cycle takes memory too.

Most objects that exist after the first step belong to compilers and DTensor, and stay. They are set aside, and only
their tensors are searched again.
"""

import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from msgspec.structs import replace
from torch import nn
from torch._library.fake_class_registry import FakeScriptObject
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.matrix.case import Case
from harness.trace.counts import LiveMemory, LiveTensor, Moment, SavedMemory
from harness.worker.probes.fsdp_params import fsdp_params
from harness.worker.probes.probe import Probe
from harness.worker.tensors.names import clean_fqn, dtype_name, is_owned, optimizers_of
from harness.worker.tensors.places import local_part
from harness.worker.virtual.collectives import FABRIC

# Hold the ranks of a mesh as a tensor. Compilation makes more of them, and keeps them with its guards and graphs.
_MESHES = frozenset({DeviceMesh, FakeScriptObject})
_SETTLED = 2  # from this step on, every step creates the same objects


class _Searched(dict[type, bool]):
    """By type, whether its objects are searched: tensors and meshes. Objects are many, their types are few."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, torch.Tensor) or kind in _MESHES
        return self[kind]


class _Live(NamedTuple):
    """One storage, as the tensor with the most dims that holds it."""

    tensor: torch.Tensor
    nbytes: int


class Census:
    """Takes a `LiveMemory` of a model that trains."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._data: list[StorageWeakRef] = []
        self._set_aside: list[weakref.ref[Any]] = []  # tensors and meshes that Python no longer lists

    def install(self) -> Callable[[], None]:
        """Watch optimizers from here on. Returns a function that ends it."""
        gc.freeze()  # what was imported before is not searched; every tensor of the run is made later
        return register_optimizer_step_post_hook(self._remember).remove

    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def attach(self, model: nn.Module) -> None:
        """The model is built. Tensors of integers that exist now are data: tokens, and the ranks of meshes."""
        self._model = model
        self._optimizers = optimizers_of(model)
        tensors = [live.tensor for live in self._alive(explained=())]
        integers = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        self._data = [StorageWeakRef(tensor.untyped_storage()) for tensor in integers]

    def set_aside(self) -> None:
        """Let Python list no object again that is alive now. The tensors among them are remembered, but not kept."""
        gc.collect()  # a cycle that is set aside would never be collected
        self._set_aside = [weakref.ref(candidate) for candidate in self._searched() if not _is_fake(candidate)]
        gc.freeze()

    def _searched(self) -> list[Any]:
        """Return the tensors and meshes that exist."""
        listed = gc.get_objects()
        known = (alive for reference in self._set_aside if (alive := reference()) is not None)
        return [*known, *compress(listed, map(_Searched().__getitem__, map(type, listed)))]

    def take(self, moment: Moment, saved: Iterable[StorageWeakRef] = ()) -> LiveMemory:
        """Return what is alive now and not explained; `saved`: storages that autograd keeps at this moment."""
        assert self._model is not None, "attach comes before the first step"
        managed = fsdp_params(self._model)
        gathered = [param._unsharded_param for param in managed if hasattr(param, "_unsharded_param")]
        explained = {weak.cdata for weak in (*saved, *self._data) if not weak.expired()}
        explained -= _storages(gathered)  # backward reads some of them
        explained |= _storages(self._owned(self._model, managed, gathered))
        _ = [param.grad for param in self._model.parameters()]  # Python lists a tensor of C++ once it has seen it
        unexplained = self._alive(explained)
        large = [live for live in unexplained if live.nbytes > live.tensor.element_size()]
        holders = _holders(self._model) if large else {}
        return LiveMemory(
            moment=moment,
            scalars=len(unexplained) - len(large),
            tensors=tuple(sorted((_record(live, holders) for live in large), key=_order)),
        )

    def _alive(self, explained: Collection[int]) -> list[_Live]:
        """Return the storages with memory unexplained. What a wrapper such as a DTensor holds is its own object."""
        objects = self._searched()
        tensors: list[torch.Tensor] = [candidate for candidate in objects if type(candidate) not in _MESHES]
        hidden = {id(plain) for owned in tensors if is_owned(owned) for plain in plain_tensors(owned)}
        hidden |= {id(held) for mesh in objects if type(mesh) in _MESHES for held in vars(mesh).values()}
        unexplained: dict[int, _Live] = {}
        for tensor in tensors:
            if id(tensor) not in hidden and not _wraps(type(tensor)):
                storage = tensor.untyped_storage()
                if storage._cdata not in explained and storage.nbytes() and not _is_fake(tensor):
                    known = unexplained.get(storage._cdata)
                    if known is None or _form(known.tensor) < _form(tensor):
                        unexplained[storage._cdata] = _Live(tensor, storage.nbytes())
        return list(unexplained.values())

    def _owned(self, model: nn.Module, managed: list[Any], gathered: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the storages that may be alive at any moment: parameters, buffers, optimizer state and data."""
        for param in managed:
            yield from (param.sharded_param, param._sharded_param_data)
        for whole in map(local_part, gathered):
            if isinstance(whole, Float8TrainingTensor):
                yield whole._scale  # FSDP2 keeps the emptied weight, with its scale
        in_use = {id(whole) for whole in gathered}
        yield from (param for param in model.parameters() if id(param) not in in_use)
        yield from model.buffers()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        yield from FABRIC.buffers()


def plain_tensors(tensor: torch.Tensor) -> Collection[torch.Tensor]:
    """The tensors with storage inside `tensor`: of a DTensor its local one, of a float8 tensor its data and scale."""
    if not _wraps(type(tensor)):
        return (tensor,)
    if type(tensor) is DTensor:
        return plain_tensors(tensor._local_tensor)
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)
    return [plain for part in inner if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]


@functools.cache
def _wraps(kind: Hashable) -> bool:
    """Return True for a class of tensors that hold others, as torch asks them: DTensor, float8 tensors."""
    return hasattr(kind, "__tensor_flatten__")


def _is_fake(candidate: object) -> bool:
    """Return True for a tensor in a compiler's description of a graph: functional, or with a storage of `meta`."""
    if not isinstance(candidate, torch.Tensor) or _wraps(type(candidate)):
        return False
    return _is_functional(candidate) or candidate.untyped_storage().device.type == "meta"


def _is_functional(tensor: torch.Tensor) -> bool:
    return torch._is_functional_tensor(getattr(tensor, "elem", tensor))


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {plain.untyped_storage()._cdata for tensor in tensors for plain in plain_tensors(tensor)}


def _form(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.dim(), tuple(tensor.shape)


def _holders(model: nn.Module) -> dict[int, str]:
    """By storage, the module attribute that holds a tensor in it, or holds a container of such tensors."""
    holders: dict[int, str] = {}
    for fqn, module in model.named_modules():
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        grads = {f"{name}.grad": param.grad for name, param in params.items()}
        for name, value in (*params.items(), *grads.items(), *vars(module).items()):
            tensors = _tensors_in(value)
            if tensors:
                place = clean_fqn(f"{fqn}.{name}" if fqn else name)
                for storage in _storages(tensors):
                    holders.setdefault(storage, place)
    return holders


def _tensors_in(value: Any) -> Collection[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) in (list, tuple, set):
        return [element for element in value if isinstance(element, torch.Tensor)]
    if type(value) is dict:
        return [element for element in value.values() if isinstance(element, torch.Tensor)]
    return ()


def _record(live: _Live, holders: dict[int, str]) -> LiveTensor:
    tensor = live.tensor
    return LiveTensor(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nbytes=live.nbytes,
        holder=holders.get(tensor.untyped_storage()._cdata, ""),
    )


def _order(tensor: LiveTensor) -> tuple[str, int, str, tuple[int, ...]]:
    return tensor.dtype, tensor.nbytes, tensor.holder, tensor.shape


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
        if step == _SETTLED and self._case.train.resumed_after is None:
            self._census.set_aside()
        self._recording = True
        self._hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor)
        # A node that kept its own output with its history would keep itself alive where no backward frees it.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._recording:
            self._measure()
        return tensor

    def _note(self, tensor: torch.Tensor) -> None:
        if self._recording:
            for plain in itertools.filterfalse(_is_functional, plain_tensors(tensor)):
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
                by_dtype[dtype_name(dtype)] += storage.nbytes()
        live = self._census.take("forward", saved=(weak for weak, _ in self._seen.values()))
        self._seen.clear()
        self._weighed.append(
            SavedMemory(
                step=self._step,
                saved_bytes=by_dtype.total(),
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
        """Return one record for every step that ran a backward pass."""
        return tuple(self._weighed)


def _watching(cached: type[Any], note: Callable[[torch.Tensor], None]) -> type[Any]:
    """Return a subclass of selective checkpointing's cache entry that calls `note` per tensor it is created for."""

    class Watched(cached):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            if isinstance(value, torch.Tensor):
                note(value)

    return Watched
