"""NCCL over the shared fabric: process groups of the backend "nccl" are made of this one, whoever makes them.

torch's CPU build lacks the class that it makes such groups of. With one in its place everything else is torch's own:
names of backends, "cpu:gloo,cuda:nccl", groups of other backends, stores. The ranks of a group agree by their store on
a file in the folder of the run, so that groups of one name may follow one another.
"""

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _dispatch, _random

from harness.plugins.exec.worker.places import CPU, is_cuda
from harness.plugins.exec.worker.script import ENDING
from harness.worker.virtual import collectives


class _Options(c10d.Backend.Options):
    """What torch sets for NCCL. Nothing of it has an effect here."""

    def __init__(self, *_: Any, is_high_priority_stream: bool = False, **__: Any) -> None:
        super().__init__("nccl")
        self.is_high_priority_stream = is_high_priority_stream
        self.config = type("Config", (), {})()


# What torch tells a group of NCCL, and nothing follows from here.
_QUIET = "_set_sequence_number_for_group _set_default_timeout _add_ephemeral_timeout _group_start _group_end"


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, c10d.FakeProcessGroup)


class ProcessGroupNCCL(metaclass=_Kind):
    """Stands where torch looks for NCCL's group: makes one over the fabric."""

    Options = _Options
    NCCL_CTA_POLICY_ZERO = 2
    folder = Path()

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        ENDING.joins(rank, size)
        collectives.FABRIC.own(options.group_name, cls.folder / agreed(store, rank), rank)
        group: Any = c10d.FakeProcessGroup
        own = group.Options()
        own.error_on_collective = True
        return group._create_internal(rank, size, own)


def agreed(store: Any, rank: int) -> str:
    """Return a name that the ranks of a new group agree on; another one each time a group is made on one store."""
    turn = store.add(f"turn/{rank}", 1)
    if rank == 0:
        store.set(f"name/{turn}", f"fabric-{uuid.uuid4().hex}")
    return str(store.get(f"name/{turn}").decode())


def install(folder: Path) -> None:
    """Let torch make groups of NCCL, of files in this folder."""
    ProcessGroupNCCL.folder = folder
    ENDING.leaves.append(collectives.FABRIC.end)
    module: Any = dist.distributed_c10d
    module._NCCL_AVAILABLE = True
    module.default_pg_nccl_timeout = timedelta(minutes=10)
    for place in (module, dist):  # a build for CPUs has no such name
        vars(place)["ProcessGroupNCCL"] = ProcessGroupNCCL
        # torch asks where the tensors are for the backend that joins them.
        vars(place)["batch_isend_irecv"] = lambda ops: [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]
    group: Any = c10d.FakeProcessGroup
    group._get_sequence_number_for_group = lambda self: 0
    for name in _QUIET.split():
        setattr(group, name, lambda self, *_: None)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    whole: Any = dist.ProcessGroup
    # Of a group that knows its GPU, torch makes others by splitting it, as NCCL alone can.
    whole.bound_device_id = property(lambda self: None, lambda self, device: None)
    stock = whole.barrier

    def barrier(self: Any, opts: Any = None, **given: Any) -> Any:
        """The tensor of a barrier is made in C++, where nothing maps it."""
        opts = opts or dist.BarrierOptions()
        opts.device = CPU
        return stock(self, opts, **given)

    whole.barrier = barrier
    _meshes_on_cpu()
    _ddp_on_cpu()
    _fsdp_on_cpu()


def _meshes_on_cpu() -> None:
    """DTensor asks for memory of the kind of its mesh, below everything that maps it."""
    mesh: Any = DeviceMesh
    stock = mesh.__init__

    def on_the_cpu(self: Any, device_type: str, *args: Any, **given: Any) -> None:
        stock(self, "cpu" if is_cuda(device_type) else device_type, *args, **given)

    mesh.__init__ = on_the_cpu
    for module in (_random, _dispatch):  # each would warn that a CPU has no tracker
        vars(module)["is_rng_supported_mesh"] = lambda _: False
    tracker: Any = _Shards()
    _random._rng_tracker = tracker


class _Shards:
    """Draws the random numbers of a DTensor: others in every shard, and the same in its replicas, as on GPUs.

    They are not the numbers of a GPU, and the generator moves on by one number whatever is drawn.
    """

    distribute_region_enabled = True

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        seed = int(torch.randint(2**62, (), generator=generator))
        shard = _random._calc_shard_linear_idx(*_random._calc_shard_info(spec.mesh.get_coordinate(), spec))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed + int(shard))
            yield


def _ddp_on_cpu() -> None:
    """DDP compares where parameters are with the GPU that it is told."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    stock = ddp.__init__

    def on_the_cpu(self: Any, module: Any, *args: Any, **given: Any) -> None:
        given |= {name: None for name in ("device_ids", "output_device") if name in given}
        stock(self, module, *(None for _ in args[:2]), *args[2:], **given)

    ddp.__init__ = on_the_cpu


def _fsdp_on_cpu() -> None:
    """FSDP1 compares where parameters are with the GPU that it computes on."""
    init: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
    stock = init._get_compute_device

    def on_the_cpu(*args: Any, **given: Any) -> Any:
        stock(*args, **given)  # it checks what it is given
        return CPU

    init._get_compute_device = on_the_cpu
