"""The collectives of the virtual device: what NCCL does, for CPU tensors, over the fabric.

Replaces the CPU kernels of the c10d operators, so DeviceMesh, FSDP2, functional collectives and compiled graphs work
unchanged. Reductions run in rank order, and sums of 16-bit floats accumulate in float32 with one rounding at the end,
so every rank gets the same bits. All collectives are synchronous. A send ends at once; what is received is written when
it is waited for, in the order in which receives were posted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch.distributed import ReduceOp, Work

from harness.worker.phase import PHASE
from harness.worker.probes.cast_numbers import dtype_name
from harness.worker.virtual.fabric import CollectiveMismatch, Fabric, Group, Loopback

BACKEND = "virtual"
Boxed = Any  # a ScriptObject around a ProcessGroup, a Work or a ReduceOp
Tensor = torch.Tensor

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_ACCUMULATE_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def create_backend(common: Any, options: Any) -> Any:
    """The process group behind the kernels, which only holds its rank and size."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


def _group(boxed: Boxed) -> Group | Loopback:
    group = dist.ProcessGroup.unbox(boxed)
    return FABRIC.group(group.group_name, lambda: dist.get_process_group_ranks(group), group.rank)


def _done() -> Boxed:
    return Work.boxed(FakeWork())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _exchange(group: Group | Loopback, kind: str, tensor: Tensor) -> list[Tensor]:
    """The flattened `tensor` of every rank, in rank order."""
    return [payload.view(tensor.dtype) for payload in group.exchange(kind, _bytes(tensor))]


def _write(target: Tensor, flat: Tensor) -> None:
    # copy_ between equal float8 dtypes is exact, and works for a strided target
    target.copy_(flat.view(target.shape))


# The kernels take the arguments of their c10d schema; `*_` are those without effect here, such as async_op and timeout.


def _allgather_base_(output: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    parts = [part.view(torch.uint8) for part in _exchange(_group(group), "all_gather", tensor)]
    _write(output, torch.cat(parts).view(output.dtype))
    return output, _done()


def _allgather_into_tensor_coalesced_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        _allgather_base_(output, tensor, group)
    return _done()


def _allgather_(
    outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
) -> tuple[list[list[Tensor]], Boxed]:
    for row, tensor in zip(outputs, tensors, strict=True):
        for output, part in zip(row, _exchange(_group(group), "all_gather", tensor), strict=True):
            _write(output, part)
    return outputs, _done()


def _reduce(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Reduces in rank order; returns a new tensor of the dtype of `parts`."""
    dtype = parts[0].dtype
    if dtype in FLOAT8:
        raise TypeError(f"{dtype} cannot be reduced, as with NCCL: cast it first")
    total = parts[0].to(_ACCUMULATE_IN.get(dtype, dtype), copy=True)
    combine = _COMBINE.get(op)
    if combine is None:
        raise NotImplementedError(f"the virtual device does not support the reduction {op}")
    for part in parts[1:]:
        combine(total, part.to(total.dtype))
    if op == ReduceOp.AVG:
        total /= len(parts)
    return total.to(dtype)


_COMBINE: dict[Any, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
}


def _allreduce_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    for tensor in tensors:
        _write(tensor, _reduce(_exchange(_group(group), "all_reduce", tensor), op.op()))
    return tensors, _done()


def _reduce_(tensors: list[Tensor], group: Boxed, op: Boxed, root_rank: int, *_: Any) -> Boxed:
    for tensor in tensors:
        parts = _exchange(_group(group), "reduce", tensor)
        if _group(group).rank == root_rank:
            _write(tensor, _reduce(parts, op.op()))
    return _done()


def _reduce_scatter_base_(output: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    fabric = _group(group)
    mine = slice(fabric.rank * output.numel(), (fabric.rank + 1) * output.numel())
    parts = _exchange(fabric, "reduce_scatter", tensor)
    _write(output, _reduce([part[mine] for part in parts], op.op()))
    return output, _done()


def _reduce_scatter_tensor_coalesced_(
    outputs: list[Tensor], tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any
) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        _reduce_scatter_base_(output, tensor, group, op)
    return _done()


def _reduce_scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, op: Boxed, *_: Any
) -> tuple[list[Tensor], Boxed]:
    _reduce_scatter_tensor_coalesced_(outputs, [torch.stack(list(row)) for row in rows], group, op)
    return outputs, _done()


def _broadcast_(tensors: list[Tensor], group: Boxed, root_rank: int, *_: Any) -> tuple[list[Tensor], Boxed]:
    for tensor in tensors:
        _write(tensor, _exchange(_group(group), "broadcast", tensor)[root_rank])
    return tensors, _done()


def _scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, root_rank: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    fabric = _group(group)
    payload = torch.cat([_bytes(part) for part in rows[0]]) if rows else torch.empty(0, dtype=torch.uint8)
    sent = fabric.exchange("scatter", payload, same_size=False)[root_rank]
    _write(outputs[0], sent.chunk(fabric.size)[fabric.rank].view(outputs[0].dtype))
    return outputs, _done()


def _gather_(outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    parts = _exchange(_group(group), "gather", tensors[0])
    for row in outputs:  # empty on every rank but the root
        for output, part in zip(row, parts, strict=True):
            _write(output, part)
    return _done()


def _alltoall_base_(
    output: Tensor, tensor: Tensor, group: Boxed, output_split_sizes: list[int], input_split_sizes: list[int], *_: Any
) -> Boxed:
    fabric = _group(group)
    rows = tensor.size(0) if tensor.dim() else 1
    splits = list(input_split_sizes) or [rows // fabric.size] * fabric.size
    row_bytes = tensor.numel() * tensor.itemsize // max(rows, 1)
    table = torch.tensor([split * row_bytes for split in splits], dtype=torch.int64).view(torch.uint8)
    received = []
    for payload in fabric.exchange("all_to_all", torch.cat([table, _bytes(tensor)]), same_size=False):
        counts = payload[: table.numel()].clone().view(torch.int64).tolist()
        begin = table.numel() + sum(counts[: fabric.rank])
        received.append(payload[begin : begin + counts[fabric.rank]])
    _write(output, torch.cat(received).view(output.dtype))
    return _done()


def _alltoall_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sizes = [output.numel() for output in outputs]
    received = torch.empty(sum(sizes), dtype=flat.dtype)
    _alltoall_base_(received, flat, group, sizes, [tensor.numel() for tensor in tensors])
    for output, part in zip(outputs, received.split(sizes), strict=True):
        _write(output, part)
    return outputs, _done()


def _barrier(tensor: Tensor, group: Boxed, *_: Any) -> Boxed:
    _exchange(_group(group), "barrier", torch.empty(0, dtype=torch.uint8))
    return _done()


# Point to point. Both sides name the dtype and the number of elements of a message, and must agree.

_DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))


def _send(tensors: list[Tensor], group: Boxed, target: int, tag: int) -> Boxed:
    fabric = _group(group)
    for tensor in tensors:
        fabric.channel(fabric.rank, target).send(_bytes(tensor), _DTYPES.index(tensor.dtype))
    return _done()


class Receive(Work):
    """A receive that was posted. To wait for it is to wait for all that were posted before it on its channel."""

    def __init__(self, into: Tensor, fabric: Group | Loopback, source: int) -> None:
        super().__init__()
        self._into, self._fabric, self._source = into, fabric, source
        _POSTED.setdefault((fabric, source), []).append(self)

    def wait(self, timeout: Any = None) -> bool:
        posted = _POSTED[self._fabric, self._source]
        while self in posted:
            posted.pop(0)._take()
        return True

    def is_completed(self) -> bool:
        return self not in _POSTED[self._fabric, self._source]

    def _take(self) -> None:
        into, fabric = self._into, self._fabric
        channel = fabric.channel(self._source, fabric.rank)
        waiting = f"where it waits for {named(into)} from rank {fabric.ranks[self._source]}"
        with contextlib.nullcontext() if channel.has_arrived else PHASE.within(waiting):
            payload, code = channel.receive()
        dtype = _DTYPES[code]
        if dtype != into.dtype or payload.numel() != into.numel() * into.itemsize:
            sender, mine = fabric.ranks[self._source], fabric.ranks[fabric.rank]
            raise CollectiveMismatch(
                f"rank {sender} sends {payload.numel() // dtype.itemsize} elements of {dtype_name(dtype)}, and rank "
                f"{mine} receives {into.numel()} of {dtype_name(into.dtype)}"
            )
        _write(into.detach(), payload.view(dtype))


class Names(Protocol):
    def name(self, tensor: Tensor) -> str | None:
        """What a tensor is that is received; None where it is another's."""


NAMES: WeakSet[Names] = WeakSet()  # for those who wait for a message


def named(tensor: Tensor) -> str:
    return next((name for naming in NAMES if (name := naming.name(tensor)) is not None), "a message")


_POSTED: dict[tuple[Group | Loopback, int], list[Receive]] = {}  # by group and source, and not yet taken


def _recv_(tensors: list[Tensor], group: Boxed, source: int, tag: int) -> Boxed:
    fabric = _group(group)
    return Work.boxed([Receive(tensor, fabric, source) for tensor in tensors][-1])


def _unsupported(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the virtual device does not support c10d::{name}")

    return kernel


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _allgather_base_,
    "_reduce_scatter_base_": _reduce_scatter_base_,
    "allgather_": _allgather_,
    "allgather_coalesced_": lambda *args: _allgather_(*args)[1],
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced_,
    "allreduce_": _allreduce_,
    "allreduce_coalesced_": lambda *args: _allreduce_(*args)[1],
    "alltoall_": _alltoall_,
    "alltoall_base_": _alltoall_base_,
    "barrier": _barrier,
    "broadcast_": _broadcast_,
    "gather_": _gather_,
    "reduce_": _reduce_,
    "reduce_scatter_": _reduce_scatter_,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensor_coalesced_,
    "scatter_": _scatter_,
    "send": _send,
    "recv_": _recv_,
    **{name: _unsupported(name) for name in ("monitored_barrier_", "recv_any_source_")},
}

_KINDS = "open all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scatter"
FABRIC = Fabric(tuple(_KINDS.split()))
