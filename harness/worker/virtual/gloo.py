"""Float8 collectives over gloo, which supports no float8: tensors are sent as bytes.

Replaces the CPU kernels of the c10d operators that FSDP2, DTensor and async TP call. Each calls what torch's kernel
calls: the method of the gloo backend. The other operators are left as they are. `PREMUL_SUM`, which gloo lacks too,
never gets to it: see `device.py`.

gloo gets aliases. Its threads hold a tensor for a moment longer than the collective takes, until they get the
interpreter's lock, and the census of live memory must not take this for a leak of the target.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work

from harness.worker.tensors.names import mark_owned
from harness.worker.virtual.collectives import FLOAT8, Boxed, Tensor, reduction

_CPU = torch.device("cpu")


def _alias(given: Any) -> Any:
    """Return a tensor, or rows of tensors, as gloo gets it."""
    if isinstance(given, torch.Tensor):
        return mark_owned(given.view(torch.uint8) if given.dtype in FLOAT8 else given.detach())
    return [_alias(one) for one in given]


def _sent(group: Boxed, method: str, *given: Any, options: Any = None, **values: object) -> Any:
    """Call a method of the gloo backend, whose collectives torch does not annotate, with options of these values."""
    for name, value in values.items():
        setattr(options, name, value)
    gloo: Any = dist.ProcessGroup.unbox(group)._get_backend(_CPU)
    return getattr(gloo, method)(*given, *(() if options is None else (options,)))


def _reduce_op(boxed: Boxed, tensors: Sequence[Tensor]) -> ReduceOp:
    """Raise for what the shared-memory backend refuses to reduce: of float8, gloo would add up the bytes."""
    reduction(boxed.op(), tensors)
    return ReduceOp(ReduceOp.RedOpType(boxed.op()))


# The kernels take the arguments of their c10d schema; `*_` are those without effect here, such as async_op and timeout.


def _allgather_base_(output: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    return output, Work.boxed(_sent(group, "_allgather_base", _alias(output), _alias(tensor)))


def _allgather_into_tensor_coalesced_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    pairs = zip(outputs, tensors, strict=True)
    works = [_sent(group, "_allgather_base", _alias(output), _alias(tensor)) for output, tensor in pairs]
    for work in works[:-1]:
        work.wait()
    return Work.boxed(works[-1])


def _allgather_(
    outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
) -> tuple[list[list[Tensor]], Boxed]:
    return outputs, Work.boxed(_sent(group, "allgather", _alias(outputs), _alias(tensors)))


def _allreduce_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    asked, reduce = dist.AllreduceOptions(), _reduce_op(op, tensors)
    return tensors, Work.boxed(_sent(group, "allreduce", _alias(tensors), options=asked, reduceOp=reduce))


def _reduce_scatter_base_(output: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    asked, reduce, given = dist.ReduceScatterOptions(), _reduce_op(op, [tensor]), (_alias(output), _alias(tensor))
    return output, Work.boxed(_sent(group, "_reduce_scatter_base", *given, options=asked, reduceOp=reduce))


def _alltoall_base_(
    output: Tensor, tensor: Tensor, group: Boxed, output_split_sizes: list[int], input_split_sizes: list[int], *_: Any
) -> Boxed:
    splits = list(output_split_sizes), list(input_split_sizes)
    return Work.boxed(_sent(group, "alltoall_base", _alias(output), _alias(tensor), *splits))


def _broadcast_(
    tensors: list[Tensor], group: Boxed, root_rank: int, root_tensor: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    asked = {"options": dist.BroadcastOptions(), "rootRank": root_rank, "rootTensor": root_tensor}
    return tensors, Work.boxed(_sent(group, "broadcast", _alias(tensors), **asked))


def _gather_(outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, root_rank: int, *_: Any) -> Boxed:
    asked = {"options": dist.GatherOptions(), "rootRank": root_rank}
    return Work.boxed(_sent(group, "gather", _alias(outputs), _alias(tensors), **asked))


def _scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, root_rank: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    asked = {"options": dist.ScatterOptions(), "rootRank": root_rank}
    return outputs, Work.boxed(_sent(group, "scatter", _alias(outputs), _alias(rows), **asked))


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _allgather_base_,
    "_reduce_scatter_base_": _reduce_scatter_base_,
    "allgather_": _allgather_,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced_,
    "allreduce_": _allreduce_,
    "alltoall_base_": _alltoall_base_,
    "broadcast_": _broadcast_,
    "gather_": _gather_,
    "scatter_": _scatter_,
}
