"""The rank program of simulations: one rank of a layout of any size, which trains two steps on fake tensors.

Model, parallelism, float8 and checkpointing are those of the reference target. Meshes are of a fake process group, the
model is distributed on the meta device, and gets fake memory inside of the fake mode: FSDP2 takes no meta parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  kernels of collectives for fake tensors
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.matrix.case import Case
from harness.matrix.layout import dp_rank
from harness.plugins.predict.worker.fake_tensor_hooks import FakeTensorHooks, Storages, silent_propagation
from harness.request import SimulationRequest
from harness.trace.counts import SimulatedRank
from harness.worker.dispatch_hooks.hook import install_hooks
from harness.worker.probes.flops import FlopsProbe
from harness.worker.probes.fsdp_params import fsdp_params
from harness.worker.probes.saved_memory import SavedMemoryProbe, plain_tensors
from harness.worker.probes.traffic import TrafficProbe
from harness.worker.targets.reference.build import ReferenceTarget, build_optimizer, distributed_model
from harness.worker.targets.reference.parallel import build_meshes
from harness.worker.targets.target import World

if TYPE_CHECKING:
    from harness.engine.program import RankContext

_STEPS = 2  # scales that are precomputed are those of the step before; every later step equals the second
_CPU = torch.device("cpu")


def preload(options: Mapping[str, str]) -> None:
    """Leave the process with one thread, so that it can be forked."""
    torch.set_num_threads(1)
    from harness.worker.virtual import mxfp8

    mxfp8.install_if_possible()
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
        target = ReferenceTarget(case, built, build_optimizer(model, case), meshes)
        saved.attach(model)
        target.optimizer.register_step_pre_hook(saved.before_update)
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
        self._storages.start()

    def _measure(self) -> None:
        self.alive = self._storages.alive()
        super()._measure()

    def before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        self.gradients = _bytes(param.grad for param in params if param.grad is not None)


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
    states = [value for state in target.optimizer.state.values() for value in state.values()]
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
