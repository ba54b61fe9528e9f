"""The hooks of the c10d operators, which all collectives end in: of DTensor, FSDP2, functional and coalesced ones.

What one rank sends to another counts where it is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness.worker.dispatch_hooks.hook import install_hook

Tensor = torch.Tensor
Boxed = Any  # a ScriptObject around a ProcessGroup or a ReduceOp


class Exchange(NamedTuple):
    kind: str
    op: str  # "sum", "max", ... of a reduction, "" otherwise
    dtype: torch.dtype
    elements: int  # number of elements that this rank contributes
    ranks: tuple[int, ...]  # global ranks of the group


# Called on every collective of this rank, before it runs. Probes append themselves; they must not write to tensors.
observers: list[Callable[[Exchange], None]] = []

# Operators that send a tensor, a list of tensors or a list of lists: their kind, and the position of that argument.
# The next argument is the group, and the one after it the operation of a reduction.
_SENDING = {
    "_allgather_base_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "gather_": ("gather", 1),
    "reduce_": ("reduce", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "send": ("send", 0),
}
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})


def resolve_group(name: str) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def notify(kind: str, op: str, dtype: torch.dtype, elements: int, group: dist.ProcessGroup) -> None:
    exchange = Exchange(kind, op, dtype, elements, tuple(dist.get_process_group_ranks(group)))
    for observe in observers:
        observe(exchange)


def _notify(kind: str, op: str, parts: Sequence[Tensor], dtype: torch.dtype, group: Boxed) -> None:
    notify(kind, op, dtype, sum(part.numel() for part in parts), dist.ProcessGroup.unbox(group))


def _sending(kind: str, at: int) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if observers:
            sent, group = args[at : at + 2]
            op = _op_name(args[at + 2]) if kind in _REDUCTIONS else ""
            for payload in [sent] if isinstance(sent, Tensor) else sent:
                parts = [payload] if isinstance(payload, Tensor) else payload
                _notify(kind, op, parts, parts[0].dtype, group)

    return before


def _op_name(boxed: Boxed) -> str:
    """Return the name of a reduction; PREMUL_SUM counts as a sum, because its factor cannot be read here."""
    op = ReduceOp.RedOpType(boxed.op())
    return "sum" if op == ReduceOp.PREMUL_SUM else op.name.lower()


def _alltoall(outputs: list[Tensor], tensors: list[Tensor], group: Boxed, *_: Any) -> None:
    if observers:
        _notify("all_to_all", "", tensors, tensors[0].dtype, group)


def _scatter(outputs: list[Tensor], rows: list[list[Tensor]], group: Boxed, *_: Any) -> None:
    if observers:  # only the root has rows
        _notify("scatter", "", rows[0] if rows else (), outputs[0].dtype, group)


def _barrier(tensor: Tensor, group: Boxed, *_: Any) -> None:
    if observers:
        _notify("barrier", "", (), torch.uint8, group)


HOOKS: dict[str, Callable[..., None]] = {
    **{name: _sending(kind, at) for name, (kind, at) in _SENDING.items()},
    "alltoall_": _alltoall,
    "scatter_": _scatter,
    "barrier": _barrier,
}


def install() -> list[torch.library.Library]:
    return [install_hook(getattr(torch.ops.c10d, name).default, before=before) for name, before in HOOKS.items()]
