"""What gloo lacks and NCCL has: float8 tensors in collectives, and the PREMUL_SUM reduction.

Float8 moves as bytes: the CPU kernels of the c10d operators hand float8 tensors to the stock backend as uint8 views,
so that DeviceMesh, FSDP2, functional collectives and compiled graphs all work unchanged. PREMUL_SUM (what FSDP2's
`set_gradient_divide_factor` asks for) never reaches the dispatcher, so the `ProcessGroup` methods scale a copy of the
input and ask for SUM. Reductions of float8 are refused, as NCCL refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

FLOAT8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_CPU = torch.device("cpu")
Boxed = Any  # a ScriptObject around a ProcessGroup or a Work


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8_DTYPES else tensor


def _all_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_bytes(tensor) for tensor in tensors]


def _backend(group: Boxed) -> Any:
    return dist.ProcessGroup.unbox(group)._get_backend(_CPU)


def _with_timeout(options: Any, timeout_ms: int, async_op: bool) -> Any:
    if timeout_ms > 0:
        options.timeout = timedelta(milliseconds=timeout_ms)
    options.asyncOp = async_op
    return options


def _allgather_base_(
    output: torch.Tensor, input: torch.Tensor, group: Boxed, async_op: bool = True, timeout: int = -1
) -> tuple[torch.Tensor, Boxed]:
    options = _with_timeout(c10d.AllgatherOptions(), timeout, async_op)
    work = _backend(group)._allgather_base(_bytes(output), _bytes(input), options)
    return output, work.boxed()


def _allgather_(
    outputs: list[list[torch.Tensor]],
    inputs: list[torch.Tensor],
    group: Boxed,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[list[torch.Tensor]], Boxed]:
    options = _with_timeout(c10d.AllgatherOptions(), timeout, async_op)
    work = _backend(group).allgather([_all_bytes(row) for row in outputs], _all_bytes(inputs), options)
    return outputs, work.boxed()


def _allgather_coalesced_(
    outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], group: Boxed, async_op: bool = True
) -> Boxed:
    options = _with_timeout(c10d.AllgatherOptions(), -1, async_op)
    rows = [_all_bytes(row) for row in outputs]
    return _backend(group).allgather_coalesced(rows, _all_bytes(inputs), options).boxed()


def _allgather_into_tensor_coalesced_(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Boxed, async_op: bool = True
) -> Boxed:
    # gloo's Python face lacks the coalesced call; one gather per tensor, in order, is what its C++ side does too.
    backend, work = _backend(group), None
    for output, tensor in zip(outputs, inputs, strict=True):
        if work is not None:
            work.wait()
        options = _with_timeout(c10d.AllgatherOptions(), -1, async_op)
        work = backend._allgather_base(_bytes(output), _bytes(tensor), options)
    assert work is not None, "a coalesced gather of no tensors"
    return work.boxed()


def _alltoall_base_(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Boxed,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    options = _with_timeout(c10d.AllToAllOptions(), timeout, async_op)
    work = _backend(group).alltoall_base(_bytes(output), _bytes(input), output_split_sizes, input_split_sizes, options)
    return work.boxed()


def _broadcast_(
    tensors: list[torch.Tensor],
    group: Boxed,
    root_rank: int,
    root_tensor: int,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    options = _with_timeout(c10d.BroadcastOptions(), timeout, async_op)
    options.rootRank, options.rootTensor = root_rank, root_tensor
    return tensors, _backend(group).broadcast(_all_bytes(tensors), options).boxed()


def _scatter_(
    outputs: list[torch.Tensor],
    inputs: list[list[torch.Tensor]],
    group: Boxed,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[torch.Tensor], Boxed]:
    options = _with_timeout(c10d.ScatterOptions(), timeout, async_op)
    options.rootRank = root_rank
    work = _backend(group).scatter(_all_bytes(outputs), [_all_bytes(row) for row in inputs], options)
    return outputs, work.boxed()


def _gather_(
    outputs: list[list[torch.Tensor]],
    inputs: list[torch.Tensor],
    group: Boxed,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Boxed:
    options = _with_timeout(c10d.GatherOptions(), timeout, async_op)
    options.rootRank = root_rank
    return _backend(group).gather([_all_bytes(row) for row in outputs], _all_bytes(inputs), options).boxed()


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": _allgather_base_,
    "allgather_": _allgather_,
    "allgather_coalesced_": _allgather_coalesced_,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced_,
    "alltoall_base_": _alltoall_base_,
    "broadcast_": _broadcast_,
    "scatter_": _scatter_,
    "gather_": _gather_,
}


def premul_factor(op: Any) -> float | None:
    """The factor of a PREMUL_SUM reduction, or None for every other reduction."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()
    assert isinstance(factor, float), f"PREMUL_SUM by a tensor is not supported, got {factor!r}"
    return factor


def scaled_reduce_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ProcessGroup.reduce_scatter_single` that understands PREMUL_SUM."""

    def method(group: Any, output: torch.Tensor, input: torch.Tensor, options: Any) -> Any:
        factor = premul_factor(options.reduceOp)
        if factor is not None:
            input = input if factor == 1.0 else input * factor
            options.reduceOp = dist.ReduceOp.SUM
        return stock(group, output, input, options)

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
            options.reduceOp = dist.ReduceOp.SUM
        return stock(group, tensors, options)

    return method
