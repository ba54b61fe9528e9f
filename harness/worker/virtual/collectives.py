"""The collectives of the virtual device: what NCCL does, on CPU tensors, over the fabric.

The CPU kernels of the c10d operators are replaced, so that DeviceMesh, FSDP2, functional collectives and compiled
graphs all work unchanged. Unlike gloo they carry float8, AVG and PREMUL_SUM. Sums run in rank order, those of 16-bit
floats in float32 with one rounding at the end, so every rank gets the same bits. Everything is complete when the call
returns. Point-to-point operations (pipeline parallelism) are refused.
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

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def create_backend(common: Any, options: Any) -> Any:
    """The process group behind the kernels: it only knows its rank and size."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


def _group(boxed: Boxed) -> Group | Loopback:
    return _fabric_group(dist.ProcessGroup.unbox(boxed))


def _fabric_group(group: dist.ProcessGroup) -> Group | Loopback:
    return FABRIC.group(group.group_name, lambda: dist.get_process_group_ranks(group), group.rank)


def _done() -> Boxed:
    return Work.boxed(FakeWork())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _like(payload: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return payload.view(tensor.dtype)


class Exchange(NamedTuple):
    """One collective, seen from one rank: what it gives and to whom."""

    kind: str
    op: str  # "sum", "max", ... of a reduction, "" otherwise
    dtype: torch.dtype  # before the bytes are viewed as uint8
    elements: int  # what this rank puts in
    ranks: tuple[int, ...]  # global ranks of the group


# Called on every collective of this rank, before it happens. Probes subscribe; they must not write.
observers: list[Callable[[Exchange], None]] = []
_paused = [0]


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Around what the harness itself sends to measure a run: it is not traffic of the target."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


def _notice(group: Group | Loopback, kind: str, tensor: torch.Tensor, op: Any = None) -> None:
    if observers and not _paused[0]:
        name = "" if op is None else _OP_NAMES.get(op, str(op))
        exchange = Exchange(kind, name, tensor.dtype, tensor.numel(), group.ranks)
        for observe in observers:
            observe(exchange)


def _share(group: Group | Loopback, kind: str, tensor: torch.Tensor, op: Any = None) -> list[torch.Tensor]:
    """Everyone's flattened `tensor`, in rank order. `op` is what they are going to be reduced with."""
    _notice(group, kind, tensor, op)
    return [_like(payload, tensor) for payload in group.exchange(kind, _bytes(tensor))]


def _write(target: torch.Tensor, flat: torch.Tensor) -> None:
    # copy_ between equal float8 dtypes is exact, and the target may be strided
    target.copy_(flat.view(target.shape))


def resolved(name: str) -> dist.ProcessGroup:
    """The process group called `name`, which is how functional collectives know it."""
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def group_by_name(name: str) -> Group | Loopback:
    """The fabric's side of the process group called `name`."""
    return _fabric_group(resolved(name))


def all_to_all(chunks: Sequence[torch.Tensor], group: Group | Loopback) -> list[torch.Tensor]:
    """Give `chunks[i]` (equal in shape) to group rank i; returns what every rank gave to this one, in rank order."""
    whole = torch.stack(list(chunks))
    parts = _share(group, "all_to_all", whole)
    return [part.view(whole.shape)[group.rank] for part in parts]


def everyones(tensor: torch.Tensor, group: Group | Loopback) -> list[torch.Tensor]:
    """A copy of every rank's `tensor`, in rank order."""
    return [part.clone().view(tensor.shape) for part in _share(group, "all_gather", tensor)]


def gather_into(output: torch.Tensor, tensor: torch.Tensor, group: Group | Loopback) -> None:
    """Write everyone's `tensor` into `output`, in rank order."""
    _write(
        output, torch.cat([part.view(torch.uint8) for part in _share(group, "all_gather", tensor)]).view(output.dtype)
    )


def _allgather_base_(
    output: torch.Tensor, tensor: torch.Tensor, group: Boxed, async_op: bool = True, timeout: int = -1
) -> tuple[torch.Tensor, Boxed]:
    gather_into(output, tensor, _group(group))
    return output, _done()


def _allgather_into_tensor_coalesced_(
    outputs: list[torch.Tensor], tensors: list[torch.Tensor], group: Boxed, async_op: bool = True
) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        gather_into(output, tensor, _group(group))
    return _done()


def _allgather_(
    outputs: list[list[torch.Tensor]],
    tensors: list[torch.Tensor],
    group: Boxed,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[list[torch.Tensor]], Boxed]:
    for row, tensor in zip(outputs, tensors, strict=True):
        for output, part in zip(row, _share(_group(group), "all_gather", tensor), strict=True):
            _write(output, part)
    return outputs, _done()


def _allgather_coalesced_(
    outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], group: Boxed, async_op: bool = True
) -> Boxed:
    return _allgather_(outputs, tensors, group)[1]


def _reduce(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce in rank order; returns a new tensor of the dtype of `parts`."""
    dtype = parts[0].dtype
    if dtype in _FLOAT8:
        raise TypeError(f"{dtype} cannot be reduced, as with NCCL: cast it first")
    total = parts[0].to(_WIDER.get(dtype, dtype), copy=True)
    combine = _COMBINE.get(op)
    if combine is None:
        raise NotImplementedError(f"the virtual device does not reduce with {op}")
    for part in parts[1:]:
        combine(total, part.to(total.dtype))
    if op == ReduceOp.AVG:
        total /= len(parts)
    return total.to(dtype)


_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
}

_OP_NAMES: dict[Any, str] = {op: op.name.lower() for op in _COMBINE}


def _all_reduce(tensor: torch.Tensor, group: Group | Loopback, op: Boxed) -> None:
    _write(tensor, _reduce(_share(group, "all_reduce", tensor, op.op()), op.op()))


def _allreduce_(
    tensors: list[torch.Tensor],
    group: Boxed,
    op: Boxed,
    sparse_indices: torch.Tensor | None = None,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    for tensor in tensors:
        _all_reduce(tensor, _group(group), op)
    return tensors, _done()


def _allreduce_coalesced_(
    tensors: list[torch.Tensor], group: Boxed, op: Boxed, async_op: bool = True, timeout: int = -1
) -> Boxed:
    return _allreduce_(tensors, group, op)[1]


def _reduce_(
    tensors: list[torch.Tensor],
    group: Boxed,
    op: Boxed,
    root_rank: int,
    root_tensor: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    for tensor in tensors:
        parts = _share(_group(group), "reduce", tensor, op.op())
        if _group(group).rank == root_rank:
            _write(tensor, _reduce(parts, op.op()))
    return _done()


def _reduce_scatter_into(output: torch.Tensor, tensor: torch.Tensor, group: Group | Loopback, op: Boxed) -> None:
    mine = slice(group.rank * output.numel(), (group.rank + 1) * output.numel())
    parts = _share(group, "reduce_scatter", tensor, op.op())
    _write(output, _reduce([part[mine] for part in parts], op.op()))


def _reduce_scatter_base_(
    output: torch.Tensor, tensor: torch.Tensor, group: Boxed, op: Boxed, async_op: bool = True, timeout: int = -1
) -> tuple[torch.Tensor, Boxed]:
    _reduce_scatter_into(output, tensor, _group(group), op)
    return output, _done()


def _reduce_scatter_tensor_coalesced_(
    outputs: list[torch.Tensor],
    tensors: list[torch.Tensor],
    group: Boxed,
    op: Boxed,
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        _reduce_scatter_into(output, tensor, _group(group), op)
    return _done()


def _reduce_scatter_(
    outputs: list[torch.Tensor],
    rows: list[list[torch.Tensor]],
    group: Boxed,
    op: Boxed,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    for output, row in zip(outputs, rows, strict=True):
        _reduce_scatter_into(output, torch.stack(list(row)), _group(group), op)
    return outputs, _done()


def _broadcast_(
    tensors: list[torch.Tensor],
    group: Boxed,
    root_rank: int,
    root_tensor: int,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    for tensor in tensors:
        _write(tensor, _share(_group(group), "broadcast", tensor)[root_rank])
    return tensors, _done()


def _scatter_(
    outputs: list[torch.Tensor],
    rows: list[list[torch.Tensor]],
    group: Boxed,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    fabric = _group(group)
    payload = torch.cat([_bytes(part) for part in rows[0]]) if rows else torch.empty(0, dtype=torch.uint8)
    _notice(fabric, "scatter", payload.view(outputs[0].dtype))
    sent = fabric.exchange("scatter", payload, same_size=False)[root_rank]
    _write(outputs[0], _like(sent.chunk(fabric.size)[fabric.rank], outputs[0]))
    return outputs, _done()


def _gather_(
    outputs: list[list[torch.Tensor]],
    tensors: list[torch.Tensor],
    group: Boxed,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    parts = _share(_group(group), "gather", tensors[0])
    for row in outputs:  # empty on every rank but the root
        for output, part in zip(row, parts, strict=True):
            _write(output, part)
    return _done()


def _alltoall_base_(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Boxed,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    fabric = _group(group)
    rows = tensor.size(0) if tensor.dim() else 1
    splits = list(input_split_sizes) or [rows // fabric.size] * fabric.size
    row_bytes = tensor.numel() * tensor.itemsize // max(rows, 1)
    table = torch.tensor([split * row_bytes for split in splits], dtype=torch.int64).view(torch.uint8)
    received = []
    _notice(fabric, "all_to_all", tensor)
    for payload in fabric.exchange("all_to_all", torch.cat([table, _bytes(tensor)]), same_size=False):
        counts = payload[: table.numel()].clone().view(torch.int64).tolist()
        begin = table.numel() + sum(counts[: fabric.rank])
        received.append(payload[begin : begin + counts[fabric.rank]])
    _write(output, torch.cat(received).view(output.dtype))
    return _done()


def _alltoall_(
    outputs: list[torch.Tensor], tensors: list[torch.Tensor], group: Boxed, async_op: bool = True, timeout: int = -1
) -> tuple[list[torch.Tensor], Boxed]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    received = torch.empty(sum(output.numel() for output in outputs), dtype=flat.dtype)
    _alltoall_base_(
        received, flat, group, [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
    )
    for output, part in zip(outputs, received.split([output.numel() for output in outputs]), strict=True):
        _write(output, part)
    return outputs, _done()


def _barrier(
    tensor: torch.Tensor, group: Boxed, device_ids: list[int], async_op: bool = True, timeout: int = -1
) -> Boxed:
    _share(_group(group), "barrier", torch.empty(0, dtype=torch.uint8))
    return _done()


def _refused(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"c10d::{name} is not part of the virtual device")

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
    **{name: _refused(name) for name in ("monitored_barrier_", "recv_", "recv_any_source_", "send")},
}

FABRIC = Fabric(
    (
        "open",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    )
)


def premul_factor(op: Any) -> float | None:
    """The factor of a PREMUL_SUM reduction, or None for every other reduction."""
    if op != ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()
    assert isinstance(factor, float), f"PREMUL_SUM by a tensor is not supported, got {factor!r}"
    return factor


def scaled_reduce_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.reduce_scatter_single` that understands PREMUL_SUM, which the operators below cannot see."""

    def method(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        factor = premul_factor(options.reduceOp)
        if factor is not None:
            tensor = tensor if factor == 1.0 else tensor * factor
            options.reduceOp = ReduceOp.SUM
        return stock(group, output, tensor, options)

    return method


def scaled_allreduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.allreduce` that understands PREMUL_SUM; scales in place, as allreduce does."""

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
