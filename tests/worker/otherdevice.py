"""A device that is no CPU: tensors of torch's PrivateUse1, whose values are in CPU tensors that only kernels read.

What reads such a tensor as if it were on a CPU fails, and so does an operator that mixes devices. Importing this makes
the device, for the life of the process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, HashStore, Work
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.matmuls import ScaledMMCounter
from harness.worker.probes.cast_numbers import Cast
from harness.worker.probes.casts import CastMeter
from harness.worker.tensors.digests import Contents, digest, ordered_digest
from harness.worker.virtual import device

_setup_privateuseone_for_python_backend("other")
device.install()


class Other(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    values_on_host: torch.Tensor


def other(values: torch.Tensor) -> Other:
    tensor = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
    tensor.__class__ = Other
    tensor.values_on_host = values
    return tensor


def _values(given: Any) -> Any:
    assert not isinstance(given, torch.Tensor) or isinstance(given, Other), "an operator mixes devices"
    return given.values_on_host if isinstance(given, Other) else given


def _kernel(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Every operator, computed on the values. Only a copy may go from one device to another."""
    if operator is torch.ops.aten._copy_from.default:
        source, target = (tensor.values_on_host if isinstance(tensor, Other) else tensor for tensor in args[:2])
        target.copy_(source)
        return args[1]
    args, kwargs = tree_map(_values, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    return tree_map(lambda leaf: other(leaf) if isinstance(leaf, torch.Tensor) else leaf, operator(*args, **kwargs))


def _all_reduce(tensors: list[Other], *_: Any) -> Any:
    return tensors, Work.boxed(FakeWork())


LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(_kernel, "PrivateUse1")
C10D = torch.library.Library("c10d", "IMPL")
C10D.impl("allreduce_", _all_reduce, "PrivateUse1")


def measured(cast: Cast, source: torch.Tensor) -> tuple[object, ...]:
    contents = Contents()
    seen = CastMeter(contents).see(cast)
    return (seen.numbers, seen.scale, seen.content.digest, contents.read(cast.bits).digest, ordered_digest(source))


def check_casts() -> None:
    """Casts, scales and digests are measured as on a CPU."""
    torch.manual_seed(0)
    source = torch.randn(8, 16)
    for scale, dim in ((torch.tensor(2.0), None), (torch.rand(8, 1) + 0.5, -1)):
        bits = (source * scale).to(torch.float8_e4m3fn)
        here = measured(Cast(source, bits, scale, dim), source)
        there = measured(Cast(other(source), other(bits), other(scale), dim), other(source))
        assert here == there and digest(source) == digest(other(source))


def check_hooks() -> None:
    """The hooks see once what runs on this device, and its own kernels run."""
    one = torch.tensor(1.0)
    a, b = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn).t()
    with ScaledMMCounter() as counted:
        product = torch._scaled_mm(other(a), other(b), other(one), other(one), out_dtype=torch.bfloat16)
    assert product.device.type == "other" and counted.calls == 2  # and once of the CPU, which computed the values
    dist.init_process_group("virtual", store=HashStore(), rank=0, world_size=1)
    exchanges: list[collectives.Exchange] = []
    collectives.observers.append(exchanges.append)
    dist.all_reduce(other(torch.ones(3)), op=dist.ReduceOp.AVG)
    assert exchanges == [collectives.Exchange("all_reduce", "avg", torch.float32, 3, (0,))]
