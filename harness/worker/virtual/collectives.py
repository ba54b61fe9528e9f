"""The collectives of the virtual device: what NCCL does, for CPU tensors, over the fabric.

Replaces the CPU kernels of the c10d operators, so DeviceMesh, FSDP2, functional collectives and compiled graphs work
unchanged. Unlike gloo it supports float8, AVG and PREMUL_SUM. Reductions run in rank order, and sums of 16-bit floats
accumulate in float32 with one rounding at the end, so every rank gets the same bits. All collectives are synchronous.
Point-to-point operations (pipeline parallelism) are not supported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, Work
from torch.distributed import ReduceOp

from harness.worker.virtual.fabric import Fabric, Group, Loopback

BACKEND = "virtual"
Boxed = Any  # a ScriptObject around a ProcessGroup, a Work or a ReduceOp
Tensor = torch.Tensor

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_ACCUMULATE_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def create_backend(common: Any, options: Any) -> Any:
    """The process group behind the kernels, which only holds its rank and size."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


def _group(boxed: Boxed) -> Group | Loopback:
    return _fabric_group(dist.ProcessGroup.unbox(boxed))


def _fabric_group(group: dist.ProcessGroup) -> Group | Loopback:
    return FABRIC.group(group.group_name, lambda: dist.get_process_group_ranks(group), group.rank)


def _done() -> Boxed:
    return Work.boxed(FakeWork())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Exchange(NamedTuple):
    """One collective as one rank calls it."""

    kind: str
    op: str  # "sum", "max", ... of a reduction, "" otherwise
    dtype: torch.dtype  # of the tensor, before its bytes are viewed as uint8
    elements: int  # number of elements that this rank contributes
    ranks: tuple[int, ...]  # global ranks of the group


# Called on every collective of this rank, before it runs. Probes append themselves; they must not write to tensors.
observers: list[Callable[[Exchange], None]] = []
_paused = [0]


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """For collectives that the harness itself issues to measure a run: they are not traffic of the target."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


def _notify(group: Group | Loopback, kind: str, tensor: Tensor, op: Any = None) -> None:
    if observers and not _paused[0]:
        name = "" if op is None else _OP_NAMES.get(op, str(op))
        exchange = Exchange(kind, name, tensor.dtype, tensor.numel(), group.ranks)
        for observe in observers:
            observe(exchange)


def _exchange(group: Group | Loopback, kind: str, tensor: Tensor, op: Any = None) -> list[Tensor]:
    """The flattened `tensor` of every rank, in rank order. `op` is the reduction that follows, for observers."""
    _notify(group, kind, tensor, op)
    return [payload.view(tensor.dtype) for payload in group.exchange(kind, _bytes(tensor))]


def _write(target: Tensor, flat: Tensor) -> None:
    # copy_ between equal float8 dtypes is exact, and works for a strided target
    target.copy_(flat.view(target.shape))


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this name, which is how functional collectives refer to groups."""
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def group_by_name(name: str) -> Group | Loopback:
    """The fabric group of the process group of this name."""
    return _fabric_group(resolve_group(name))


def all_to_all(chunks: Sequence[Tensor], group: Group | Loopback) -> list[Tensor]:
    """Sends `chunks[i]` (all of one shape) to group rank i; returns what this rank received, in rank order."""
    whole = torch.stack(list(chunks))
    parts = _exchange(group, "all_to_all", whole)
    return [part.view(whole.shape)[group.rank] for part in parts]


def gathered_copies(tensor: Tensor, group: Group | Loopback) -> list[Tensor]:
    """A copy of the `tensor` of every rank, in rank order."""
    return [part.clone().view(tensor.shape) for part in _exchange(group, "all_gather", tensor)]


def gather_into(output: Tensor, tensor: Tensor, group: Group | Loopback) -> None:
    """Writes the `tensor` of every rank into `output`, in rank order."""
    parts = [part.view(torch.uint8) for part in _exchange(group, "all_gather", tensor)]
    _write(output, torch.cat(parts).view(output.dtype))


# The kernels take the arguments of their c10d schema; `*_` are those without effect here, such as async_op and timeout.


def _allgather_base_(output: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    gather_into(output, tensor, _group(group))
    return output, _done()


def _allgather_into_tensor_coalesced_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        gather_into(output, tensor, _group(group))
    return _done()


def _allgather_(
    outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
) -> tuple[list[list[Tensor]], Boxed]:
    for row, tensor in zip(outputs, tensors, strict=True):
        for output, part in zip(row, _exchange(_group(group), "all_gather", tensor), strict=True):
            _write(output, part)
    return outputs, _done()


def _allgather_coalesced_(outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    return _allgather_(outputs, tensors, group)[1]


def _reduce(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Reduces in rank order; returns a new tensor of the dtype of `parts`."""
    dtype = parts[0].dtype
    if dtype in _FLOAT8:
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

_OP_NAMES: dict[Any, str] = {op: op.name.lower() for op in _COMBINE}


def _allreduce_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    for tensor in tensors:
        _write(tensor, _reduce(_exchange(_group(group), "all_reduce", tensor, op.op()), op.op()))
    return tensors, _done()


def _allreduce_coalesced_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> Boxed:
    return _allreduce_(tensors, group, op)[1]


def _reduce_(tensors: list[Tensor], group: Boxed, op: Boxed, root_rank: int, *_: Any) -> Boxed:
    for tensor in tensors:
        parts = _exchange(_group(group), "reduce", tensor, op.op())
        if _group(group).rank == root_rank:
            _write(tensor, _reduce(parts, op.op()))
    return _done()


def _reduce_scatter_base_(output: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    fabric = _group(group)
    mine = slice(fabric.rank * output.numel(), (fabric.rank + 1) * output.numel())
    parts = _exchange(fabric, "reduce_scatter", tensor, op.op())
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
    _notify(fabric, "scatter", payload.view(outputs[0].dtype))
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
    _notify(fabric, "all_to_all", tensor)
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


def _unsupported(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the virtual device does not support c10d::{name}")

    return kernel


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _allgather_base_,
    "_reduce_scatter_base_": _reduce_scatter_base_,
    "allgather_": _allgather_,
    "allgather_coalesced_": _allgather_coalesced_,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced_,
    "allreduce_": _allreduce_,
    "allreduce_coalesced_": _allreduce_coalesced_,
    "alltoall_": _alltoall_,
    "alltoall_base_": _alltoall_base_,
    "barrier": _barrier,
    "broadcast_": _broadcast_,
    "gather_": _gather_,
    "reduce_": _reduce_,
    "reduce_scatter_": _reduce_scatter_,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensor_coalesced_,
    "scatter_": _scatter_,
    **{name: _unsupported(name) for name in ("monitored_barrier_", "recv_", "recv_any_source_", "send")},
}

_KINDS = "open all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scatter"
FABRIC = Fabric(tuple(_KINDS.split()))


def premul_factor(op: Any) -> float | None:
    """The factor of a PREMUL_SUM reduction; None for other reductions."""
    if op != ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()
    assert isinstance(factor, float), f"PREMUL_SUM by a tensor is not supported, got {factor!r}"
    return factor


def scaled_reduce_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.reduce_scatter_single` with PREMUL_SUM, whose factor the c10d operators cannot read."""

    def method(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        factor = premul_factor(options.reduceOp)
        if factor is not None:
            tensor = tensor if factor == 1.0 else tensor * factor
            options.reduceOp = ReduceOp.SUM
        return stock(group, output, tensor, options)

    return method


def scaled_allreduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.allreduce` with PREMUL_SUM; scales in place, as allreduce does."""

    def method(group: Any, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is None:
            return stock(group, tensors)
        factor = premul_factor(options.reduceOp)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
            options.reduceOp = ReduceOp.SUM
        return stock(group, tensors, options)

    return method
