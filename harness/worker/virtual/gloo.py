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


def _gloo(group: Boxed) -> Any:  # torch annotates no collective of its Backend
    return dist.ProcessGroup.unbox(group)._get_backend(_CPU)


def _reduce_op(boxed: Boxed, tensors: Sequence[Tensor]) -> ReduceOp:
    """Raise for what the shared-memory backend refuses to reduce: of float8, gloo would add up the bytes."""
    reduction(boxed.op(), tensors)
    return ReduceOp(ReduceOp.RedOpType(boxed.op()))


def _alias(tensor: Tensor) -> Tensor:
    return mark_owned(tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor.detach())


def _alias_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_alias(tensor) for tensor in tensors]


def _alias_rows(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [_alias_all(row) for row in rows]


# The kernels take the arguments of their c10d schema; `*_` are those without effect here, such as async_op and timeout.


def _allgather_base_(output: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    return output, Work.boxed(_gloo(group)._allgather_base(_alias(output), _alias(tensor)))


def _allgather_into_tensor_coalesced_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    gloo = _gloo(group)
    works = [
        gloo._allgather_base(_alias(output), _alias(tensor)) for output, tensor in zip(outputs, tensors, strict=True)
    ]
    for work in works[:-1]:
        work.wait()
    return Work.boxed(works[-1])


def _allgather_(
    outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
) -> tuple[list[list[Tensor]], Boxed]:
    return outputs, Work.boxed(_gloo(group).allgather(_alias_rows(outputs), _alias_all(tensors)))


def _allreduce_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    options = dist.AllreduceOptions()
    options.reduceOp = _reduce_op(op, tensors)
    return tensors, Work.boxed(_gloo(group).allreduce(_alias_all(tensors), options))


def _reduce_scatter_base_(output: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduce_op(op, [tensor])
    return output, Work.boxed(_gloo(group)._reduce_scatter_base(_alias(output), _alias(tensor), options))


def _alltoall_base_(
    output: Tensor, tensor: Tensor, group: Boxed, output_split_sizes: list[int], input_split_sizes: list[int], *_: Any
) -> Boxed:
    work = _gloo(group).alltoall_base(_alias(output), _alias(tensor), list(output_split_sizes), list(input_split_sizes))
    return Work.boxed(work)


def _broadcast_(
    tensors: list[Tensor], group: Boxed, root_rank: int, root_tensor: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root_rank, root_tensor
    return tensors, Work.boxed(_gloo(group).broadcast(_alias_all(tensors), options))


def _gather_(outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, root_rank: int, *_: Any) -> Boxed:
    options = dist.GatherOptions()
    options.rootRank = root_rank
    return Work.boxed(_gloo(group).gather(_alias_rows(outputs), _alias_all(tensors), options))


def _scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, root_rank: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    options = dist.ScatterOptions()
    options.rootRank = root_rank
    return outputs, Work.boxed(_gloo(group).scatter(_alias_all(outputs), _alias_rows(rows), options))


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
