"""The rank program of simulations: one rank of a layout of any size, which trains two steps on fake tensors.

Model, parallelism, float8 and checkpointing are those of the reference target. Meshes are of a fake process group, the
model is distributed on the meta device, and gets fake memory inside of the fake mode: FSDP2 takes no meta parameters.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  kernels of collectives for fake tensors
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.engine.program import RankContext
from harness.matrix.case import Case
from harness.matrix.layout import dp_rank
from harness.plugins.predict.simulated import SimulatedMatmul, SimulatedRank, SimulationRequest
from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.hook import HOOKS, install_hooks, observed, unobserved
from harness.worker.dispatch_hooks.products import precision_of
from harness.worker.probes.flops import FlopsProbe
from harness.worker.probes.fsdp_params import fsdp_params
from harness.worker.probes.saved_memory import SavedMemoryProbe, plain_tensors
from harness.worker.probes.traffic import TrafficProbe
from harness.worker.targets.reference.build import ReferenceTarget, build_optimizers, distributed_model
from harness.worker.targets.reference.parallel import build_meshes
from harness.worker.targets.target import World
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
            kind, reduces = _FUNCTIONAL[func]
            tensor, group = args[0], collectives.resolve_group(args[-1])
            collectives.notify(kind, args[1] if reduces else "", tensor.dtype, tensor.numel(), group)

    def start(self) -> None:
        self._matmuls.clear()

    def matmuls(self) -> tuple[SimulatedMatmul, ...]:
        return tuple(
            SimulatedMatmul(precision=precision, m=m, n=n, k=k, calls=calls)
            for (precision, m, n, k), calls in sorted(self._matmuls.items())
        )


def silent_propagation() -> Callable[..., Any]:
    """DTensor's propagation of shapes, unobserved: under a fake mode it runs the operators of whole tensors in it."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def silent(*args: Any, **kwargs: Any) -> Any:
        with unobserved():
            return propagate(*args, **kwargs)

    return silent


_STEPS = 2  # scales that are precomputed are those of the step before; every later step equals the second
_CPU = torch.device("cpu")


def preload(options: Mapping[str, str]) -> None:
    """Leave the process with one thread, so that it can be forked."""
    torch.set_num_threads(1)
    from harness.worker.virtual import casts

    casts.install_if_possible()
    install_hooks(compiled=False)


def rank_main(context: RankContext) -> bytes:
    """Simulate one rank of the payload (`SimulationRequest`). Returns an encoded `SimulatedRank`."""
    request = msgspec.msgpack.decode(context.payload, type=SimulationRequest)
    case, rank = request.case, request.ranks[context.rank]
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    try:
        return msgspec.msgpack.encode(simulate(case, rank))
    except RuntimeError as error:
        if "divisible by 16" not in str(error):
            raise
        return msgspec.msgpack.encode(SimulatedRank(rank=rank, refusal=str(error)))


def simulate(case: Case, rank: int) -> SimulatedRank:
    """Take two steps of the case as this rank takes them, and record the second."""
    world = World(_CPU, case.uses_fsdp, dp_rank(case.layout, rank), case.train.accumulation, case.microbatch)
    meshes = build_meshes(case.layout, world)
    built = distributed_model(case, meshes, world, torch.device("meta"))
    model = built.model
    storages = Storages()
    hooks = FakeTensorHooks(storages)
    traffic, flops, saved = TrafficProbe(case, _CPU), FlopsProbe(case, _CPU), _SimulatedMemoryProbe(case, storages)
    with ExitStack() as stack:
        for probe in (traffic, flops, saved):
            stack.enter_context(probe)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(hooks)
        traffic.replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", silent_propagation())
        for name in ("alloc_storage", "free_storage"):
            traffic.replace(_fsdp_param, name, _noting(getattr(_fsdp_param, name), storages))
        traffic.replace(WeightWithDynamicFloat8CastTensor, "__tensor_flatten__", _flattened)
        model.to_empty(device="cpu")
        target = ReferenceTarget(case, built, build_optimizers(model, case), meshes)
        saved.attach(model)
        stack.callback(register_optimizer_step_pre_hook(lambda *_: saved.before_update(model)).remove)
        for step in range(1, _STEPS + 1):
            tokens = torch.zeros((case.microbatch, case.train.seq_len + 1), dtype=torch.int64)
            hooks.start()
            for probe in (traffic, flops, saved):
                probe.begin_step(step)
            target.step([tokens] * case.train.accumulation)
            for probe in (traffic, flops):
                probe.after_update(model)
            saved.after_backward(model)
        return SimulatedRank(
            rank=rank,
            traffic=tuple(record for record in traffic.result() if record.step == _STEPS),
            matmuls=hooks.matmuls(),
            flops=tuple(record for record in flops.result() if record.step == _STEPS),
            memory=_memory(target, saved, storages.peak),
        )


class _SimulatedMemoryProbe(SavedMemoryProbe):
    """Also takes note of all that is alive when backward begins, and of the gradients when the optimizer runs."""

    def __init__(self, case: Case, storages: Storages) -> None:
        super().__init__(case, _CPU)
        self._storages = storages
        self.alive = 0
        self.gradients = 0

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.gradients = 0
        self._storages.start()

    def _measure(self) -> None:
        self.alive = self._storages.alive()
        super()._measure()

    def before_update(self, model: nn.Module) -> None:
        """Take note of gradients when the first optimizer of a step begins."""
        grads = (param.grad for param in model.parameters() if param.grad is not None)
        self.gradients = self.gradients or _bytes(grads)


def _flattened(weight: Any) -> tuple[list[str], dict[str, Any]]:
    """torchao's `__tensor_flatten__`, which asks whether a scale is zero where it means whether there is one."""
    names = ["_tensor", *(["_precomputed_scale"] if weight._precomputed_scale is not None else [])]
    return names, {"mm_config": weight._linear_mm_config, "dtype": weight._dtype}


def _noting(resize: Any, storages: Storages) -> Any:
    def noting(tensor: torch.Tensor) -> None:
        resize(tensor)
        storages.note_storage(tensor.untyped_storage())

    return noting


def _memory(target: ReferenceTarget, probe: _SimulatedMemoryProbe, peak: int) -> dict[str, int]:
    model = target.model
    managed = fsdp_params(model)
    parameters = [param._sharded_param_data for param in managed] if managed else list(model.parameters())
    states = [value for of in target.optimizers for state in of.state.values() for value in state.values()]
    counters = _bytes(value for value in states if not value.dim())  # of updates, which are on the host
    return {
        "parameters": _bytes(parameters),
        "buffers": _bytes(model.buffers()),
        "optimizer": _bytes(value for value in states if value.dim()),
        "gradients": probe.gradients,
        "saved": probe.result()[-1].saved_bytes,
        "before_backward": probe.alive - counters,
        "peak": peak - counters,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    plain = (plain_tensor.untyped_storage() for tensor in tensors for plain_tensor in plain_tensors(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in plain}.values())
