"""The collectives of the virtual device: what NCCL does, for CPU tensors, over the fabric.

Replaces the CPU kernels of the c10d operators, so DeviceMesh, DDP, FSDP2, functional collectives and compiled graphs
work unchanged. Reductions run in rank order, and sums of 16-bit floats accumulate in float32 with one rounding at the
end, so every rank gets the same bits. All collectives are synchronous. A send ends at once; what is received is written
when it is waited for, in the order in which receives were posted.

NCCL takes tensors as memory, below autograd, if it takes them at all. What it refuses is refused here, before anything
is sent and with its errors: `check_gpu_single_tensor` and `assertTypeAndSizesMatch` of torch's ProcessGroupNCCL.cpp and
Utils.hpp, the dtypes of NCCLUtils.cpp.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp, Work

from harness.worker.process.process import PROCESS
from harness.worker.tensors.names import dtype_name
from harness.worker.tensors.ranks import WIDE
from harness.worker.virtual.fabric import CollectiveMismatch, Fabric, Group, Loopback

Tensor = torch.Tensor
# No history, no version, and inference tensors may be written anywhere.
below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_NCCL_DTYPES = FLOAT8 | {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NCCL_DTYPES |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory(tensor: Tensor, *, message: bool = False) -> Tensor:
    """Return the elements of a tensor in the order of its memory: [numel], an alias that shares no version with it.

    `message`: NCCL sends it from rank to rank, and then a transposed tensor will do. Raises ValueError for another one
    that is not contiguous, and TypeError for a dtype that NCCL lacks.
    """
    if tensor.dtype not in _NCCL_DTYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    layout = _FORMATS.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=layout):
        if not message:
            raise ValueError("Tensors must be contiguous")
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            raise ValueError("Tensors for P2P must be non-overlapping and dense")
    with below_autograd():
        return tensor.as_strided((tensor.numel(),), (1,))


def read(tensor: Tensor, *, message: bool = False) -> Tensor:
    """Return the bytes of a tensor: [bytes], an alias."""
    return memory(tensor, message=message).view(torch.uint8)


def write(target: Tensor, values: Tensor) -> None:
    """Write `values` of the dtype of `target`, [numel], to its memory."""
    with below_autograd():
        memory(target).copy_(values)


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of numbers, which NCCL reduces and broadcasts."""
    with below_autograd():
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def require_like(tensors: Sequence[Tensor], like: Tensor, where: str) -> None:
    """Raise ValueError unless all have the dtype and the shape of `like`."""
    for number, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise ValueError(f"{where}: invalid tensor type at index {number}: {tensor.dtype}, not {like.dtype}")
        if tensor.shape != like.shape:
            raise ValueError(
                f"{where}: invalid tensor size at index {number}: {list(tensor.shape)}, not {list(like.shape)}"
            )


def require_times(whole: Tensor, part: Tensor, times: int) -> None:
    """Raise TypeError and ValueError unless `whole` has the dtype of `part`, and as many elements as so many of it."""
    if whole.dtype != part.dtype:
        raise TypeError(f"input and output must have the same dtype, not {whole.dtype} and {part.dtype}")
    if whole.numel() != part.numel() * times:
        raise ValueError(f"{whole.numel()} elements are not {times} times {part.numel()}")


def require_count(tensors: Sequence[Tensor], size: int, like: Tensor | None) -> None:
    """Raise ValueError unless there is a tensor for every rank, each with the elements of `like`."""
    if len(tensors) != size:
        raise ValueError(f"a tensor for every rank: got {len(tensors)} for {size} ranks")
    if like is not None and any(tensor.numel() != like.numel() for tensor in tensors):
        raise ValueError("All tensor operands to scatter/gather must have the same number of elements")


BACKEND = "virtual"
Boxed = Any  # a ScriptObject around a ProcessGroup, a Work or a ReduceOp


def create_backend(common: Any, options: Any) -> Any:
    """Return the process group behind the kernels, which only holds its rank and size. A collective of its own would do
    nothing: it raises.
    """
    FABRIC.own(common.group_id)
    group: Any = c10d.FakeProcessGroup  # torch annotates it otherwise
    options = group.Options()
    options.error_on_collective = True
    return group._create_internal(common.group_rank, common.group_size, options)


def _group(boxed: Boxed) -> Group | Loopback:
    group = dist.ProcessGroup.unbox(boxed)
    return FABRIC.group(group.group_name, lambda: dist.get_process_group_ranks(group), group.rank)


def _done(written: Sequence[Tensor] = ()) -> Boxed:
    """Return a work that has ended. Its future holds what was written: DDP reads it there."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(written))
    return Work.boxed(c10d._create_work_from_future(future))  # type: ignore[attr-defined]


def _exchange(group: Group | Loopback, kind: str, tensor: Tensor) -> list[Tensor]:
    """Return the memory of `tensor` of every rank, [numel], in rank order."""
    return [payload.view(tensor.dtype) for payload in group.exchange(kind, read(tensor))]


# The kernels take the arguments of their c10d schema; `*_` are those without effect here, such as async_op and timeout.


def _allgather_base_(output: Tensor, tensor: Tensor, group: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    fabric = _group(group)
    require_times(output, tensor, fabric.size)
    into = read(output)
    write(into, torch.cat(fabric.exchange("all_gather", read(tensor))))
    return output, _done([output])


def _allgather_into_tensor_coalesced_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        _allgather_base_(output, tensor, group)
    return _done(outputs)


def _allgather_(
    outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, *_: Any
) -> tuple[list[list[Tensor]], Boxed]:
    """NCCL gathers equal parts into memory of its own, and copies them as any other code would: autograd sees it."""
    fabric = _group(group)
    for row, tensor in zip(outputs, tensors, strict=True):
        even = all(output.shape == row[0].shape for output in row)
        require_count(row, fabric.size, like=tensor if even else None)
        if not even:
            require_times(row[fabric.rank], tensor, 1)
        payloads = fabric.exchange("all_gather", read(tensor), same_size=even)
        for source, (output, payload) in enumerate(zip(row, payloads, strict=True)):
            if even:
                output.copy_(payload.view(tensor.dtype).view(output.shape))
            else:
                _take(output, payload, fabric, source)
    return outputs, _done([output for row in outputs for output in row])


def _take(output: Tensor, payload: Tensor, fabric: Group | Loopback, source: int) -> None:
    """Write what a rank has sent. Raises CollectiveMismatch where it is more or less than `output` holds."""
    into = read(output, message=True)
    if into.numel() != payload.numel():
        raise CollectiveMismatch(
            f"rank {fabric.ranks[source]} sends {payload.numel()} bytes, and rank {fabric.ranks[fabric.rank]} receives "
            f"{into.numel()}"
        )
    write(into, payload)


def reduction(op: Any, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return what reduces the parts of all ranks in rank order, to a new tensor of their dtype.

    Raises for what cannot be reduced so before anything is sent: what NCCL refuses, and float8, whose sum would depend
    on the order.
    """
    name = ReduceOp.RedOpType(op).name
    for tensor in tensors:
        if tensor.dtype in FLOAT8:
            raise TypeError(f"{tensor.dtype} cannot be reduced: cast it first")
        if tensor.is_complex() and op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise RuntimeError(f"{name} of complex tensors is not supported")
        if tensor.dtype == torch.bool and op == ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    combine = _COMBINE.get(op)
    if combine is None:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")

    def reduce(parts: Sequence[Tensor]) -> Tensor:
        dtype = parts[0].dtype
        total = parts[0].to(WIDE.get(dtype, dtype), copy=True)
        for part in parts[1:]:
            combine(total, part.to(total.dtype))
        if op == ReduceOp.AVG:
            total.div_(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
        return total.to(dtype)

    return reduce


_COMBINE: dict[Any, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
}


def _allreduce_(tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    fabric, reduce = _group(group), reduction(op.op(), tensors)
    for tensor in map(real, tensors):
        write(tensor, reduce(_exchange(fabric, "all_reduce", tensor)))
    return tensors, _done(tensors)


def _reduce_(tensors: list[Tensor], group: Boxed, op: Boxed, root_rank: int, *_: Any) -> Boxed:
    fabric, reduce = _group(group), reduction(op.op(), tensors)
    _require_root(fabric, root_rank)
    for tensor in map(real, tensors):
        parts = _exchange(fabric, "reduce", tensor)
        if fabric.rank == root_rank:
            write(tensor, reduce(parts))
    return _done(tensors)


def _require_root(fabric: Group | Loopback, root_rank: int) -> None:
    if not 0 <= root_rank < fabric.size:
        raise ValueError(f"invalid root rank: {root_rank} of {fabric.size}")


def _reduce_scatter_base_(output: Tensor, tensor: Tensor, group: Boxed, op: Boxed, *_: Any) -> tuple[Tensor, Boxed]:
    fabric, reduce = _group(group), reduction(op.op(), [tensor])
    require_times(tensor, output, fabric.size)
    mine = slice(fabric.rank * output.numel(), (fabric.rank + 1) * output.numel())
    parts = _exchange(fabric, "reduce_scatter", tensor)
    write(output, reduce([part[mine] for part in parts]))
    return output, _done([output])


def _reduce_scatter_tensor_coalesced_(
    outputs: list[Tensor], tensors: list[Tensor], group: Boxed, op: Boxed, *_: Any
) -> Boxed:
    for output, tensor in zip(outputs, tensors, strict=True):
        _reduce_scatter_base_(output, tensor, group, op)
    return _done(outputs)


def _reduce_scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, op: Boxed, *_: Any
) -> tuple[list[Tensor], Boxed]:
    """NCCL copies equal parts to memory of its own, so that they need not be contiguous."""
    fabric, reduce = _group(group), reduction(op.op(), [tensor for row in rows for tensor in row])
    for output, row in zip(outputs, rows, strict=True):
        even = all(tensor.shape == row[0].shape for tensor in row)
        require_count(row, fabric.size, like=output if even else None)
        require_times(row[fabric.rank], output, 1)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in row])
        start = sum(tensor.numel() for tensor in row[: fabric.rank])
        parts = _exchange(fabric, "reduce_scatter", flat)
        write(output, reduce([part[start : start + output.numel()] for part in parts]))
    return outputs, _done(outputs)


def _broadcast_(tensors: list[Tensor], group: Boxed, root_rank: int, *_: Any) -> tuple[list[Tensor], Boxed]:
    fabric = _group(group)
    _require_root(fabric, root_rank)
    for tensor in map(real, tensors):
        write(tensor, _exchange(fabric, "broadcast", tensor)[root_rank])
    return tensors, _done(tensors)


def _scatter_(
    outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, root_rank: int, *_: Any
) -> tuple[list[Tensor], Boxed]:
    fabric, (output,) = _group(group), outputs
    _require_root(fabric, root_rank)
    parts, empty = rows[0] if rows else [], read(output, message=True)[:0]
    if fabric.rank == root_rank:
        require_count(parts, fabric.size, like=None)
        require_like(parts, output, "scatter")
    payload = torch.cat([empty, *(read(part, message=True) for part in parts)])
    sent = fabric.exchange("scatter", payload, same_size=False)[root_rank]
    _take(output, sent.chunk(fabric.size)[fabric.rank] if sent.numel() else sent, fabric, root_rank)
    return outputs, _done(outputs)


def _gather_(outputs: list[list[Tensor]], tensors: list[Tensor], group: Boxed, root_rank: int, *_: Any) -> Boxed:
    fabric, (tensor,) = _group(group), tensors
    _require_root(fabric, root_rank)
    into = outputs[0] if outputs else []  # empty on every rank but the root
    if fabric.rank == root_rank:
        require_count(into, fabric.size, like=None)
        require_like(into, tensor, "gather")
    payloads = fabric.exchange("gather", read(tensor, message=True))
    for source, output in enumerate(into):
        _take(output, payloads[source], fabric, source)
    return _done(into)


def _split_sizes(given: Sequence[int], tensor: Tensor, size: int) -> list[int]:
    """Return the rows for every rank, or from it: `checkSplitSizes` of torch's Utils.hpp."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not given:
        if rows % size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return [rows // size] * size
    if len(given) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(given) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    return list(given)


def _alltoall_base_(
    output: Tensor, tensor: Tensor, group: Boxed, output_split_sizes: list[int], input_split_sizes: list[int], *_: Any
) -> Boxed:
    fabric = _group(group)
    sent = read(tensor).split(_byte_counts(input_split_sizes, tensor, fabric.size))
    into = read(output).split(_byte_counts(output_split_sizes, output, fabric.size))
    _pass_on(fabric, into, sent)
    return _done([output])


def _byte_counts(splits: Sequence[int], tensor: Tensor, size: int) -> list[int]:
    rows = max(tensor.size(0), 1) if tensor.dim() else 1
    return [split * (tensor.numel() // rows * tensor.itemsize) for split in _split_sizes(splits, tensor, size)]


def _pass_on(fabric: Group | Loopback, into: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """What this rank has for every rank, and gets from it, in bytes."""
    table = torch.tensor([part.numel() for part in sent], dtype=torch.int64).view(torch.uint8)
    payloads = fabric.exchange("all_to_all", torch.cat([table, *sent]), same_size=False)
    for source, (output, payload) in enumerate(zip(into, payloads, strict=True)):
        ends = list(itertools.accumulate(payload[: table.numel()].clone().view(torch.int64).tolist(), initial=0))
        begin, end = ends[fabric.rank : fabric.rank + 2]
        _take(output, payload[table.numel() :][begin:end], fabric, source)


def _alltoall_(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> tuple[list[Tensor], Boxed]:
    fabric = _group(group)
    require_count(outputs, fabric.size, like=None)
    require_count(tensors, fabric.size, like=None)
    into, sent = ([read(tensor, message=True) for tensor in given] for given in (outputs, tensors))
    _pass_on(fabric, into, sent)
    return outputs, _done(outputs)


def _barrier(tensor: Tensor, group: Boxed, *_: Any) -> Boxed:
    _exchange(_group(group), "barrier", torch.empty(0, dtype=torch.uint8))
    return _done()


# Point to point. Both sides name the dtype and the number of elements of a message, and must agree.

_DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))


def _send(tensors: list[Tensor], group: Boxed, target: int, tag: int) -> Boxed:
    fabric = _group(group)
    for tensor in tensors:
        fabric.channel(fabric.rank, target).send(read(tensor, message=True), _DTYPES.index(tensor.dtype))
    return _done()


class Receive(Work):
    """A receive that was posted. To wait for it is to wait for all that were posted before it on its channel."""

    def __init__(self, into: Tensor, fabric: Group | Loopback, source: int) -> None:
        super().__init__()
        self._into, self._memory, self._fabric, self._source = into, memory(into, message=True), fabric, source
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
        with contextlib.nullcontext() if channel.has_arrived else PROCESS.phase.within(waiting):
            payload, code = channel.receive()
        dtype = _DTYPES[code]
        if dtype != into.dtype or payload.numel() != into.numel() * into.itemsize:
            sender, mine = fabric.ranks[self._source], fabric.ranks[fabric.rank]
            raise CollectiveMismatch(
                f"rank {sender} sends {payload.numel() // dtype.itemsize} elements of {dtype_name(dtype)}, and rank "
                f"{mine} receives {into.numel()} of {dtype_name(into.dtype)}"
            )
        write(self._memory, payload.view(dtype))


class Names(Protocol):
    def name(self, tensor: Tensor) -> str | None:
        """Return what a tensor is that is received; None if it is another's."""


NAMES: WeakSet[Names] = WeakSet()  # for those who wait for a message


def named(tensor: Tensor) -> str:
    return next((name for naming in NAMES if (name := naming.name(tensor)) is not None), "a message")


_POSTED: dict[tuple[Group | Loopback, int], list[Receive]] = {}  # by group and source, and not yet taken


def _recv_(tensors: list[Tensor], group: Boxed, source: int, tag: int) -> Boxed:
    fabric = _group(group)
    return Work.boxed([Receive(tensor, fabric, source) for tensor in tensors][-1])


def _unsupported(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"NCCL does not support c10d::{name}, nor does the virtual device")

    return kernel


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _allgather_base_,
    "_reduce_scatter_base_": _reduce_scatter_base_,
    "allgather_": _allgather_,
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
    **{name: _unsupported(name) for name in ("allgather_coalesced_", "monitored_barrier_", "recv_any_source_")},
}

_KINDS = "open all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scatter"
FABRIC = Fabric(tuple(_KINDS.split()))
