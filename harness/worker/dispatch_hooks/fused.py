"""Hooks on the fused operators of async TP (`symm_mem`), and on what they send without c10d.

On CUDA a fused operator reads the symmetric memory of its peers, unless torch's reference (`fallback`) is enabled. No
collective is called then, so the hook reports to the observers of collectives what the operator exchanges: the same
that the transport of the virtual device sends by collectives.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem

from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.hook import install_hook

# Called with (operator, arguments by name, result) after every fused operator. Probes append themselves; they must not
# write to tensors.
observers: list[Callable[[str, dict[str, Any], Any], None]] = []

OPERATORS = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


class Sent(NamedTuple):
    """What a fused operator sends to its group at once."""

    kind: str
    dtype: torch.dtype
    elements: int


def sent_by(given: dict[str, Any]) -> Iterator[Sent]:
    """What a pipelined fused operator with these arguments sends (torch 2.13, `_fused_all_gather_matmul_impl`, ...)."""
    a = given["A"]
    if "gather_dim" in given:
        yield Sent("all_gather", a.dtype, a.numel())
        scale = given.get("A_scale")
        if scale is not None and scale.shape == (*a.shape[:-1], 1):  # of the rows of this rank
            yield Sent("all_gather", scale.dtype, scale.numel())
    else:
        partial_sums = a.numel() // a.shape[-1] * given["B"].shape[1]
        yield Sent("all_to_all", given.get("out_dtype") or a.dtype, partial_sums)


def notify_of_transport(given: dict[str, Any]) -> None:
    """Notify the observers of collectives of what the fused operator with these arguments sends without c10d."""
    if collectives.observers and given["A"].is_cuda and not symm_mem._is_test_mode:
        group = collectives.resolve_group(given["group_name"])
        for sent in sent_by(given):
            collectives.notify(sent.kind, "", sent.dtype, sent.elements, group)


def naming(operator: torch._ops.OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that names the arguments of a call of this operator, given by position or by name."""
    names = [argument.name for argument in operator._schema.arguments]
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs


def _install(name: str) -> torch.library.Library:
    operator = getattr(torch.ops.symm_mem, name).default
    given = naming(operator)

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        for observe in observers:
            observe(name, given(args, kwargs), result)

    return install_hook(operator, before=lambda *args, **kwargs: notify_of_transport(given(args, kwargs)), after=after)


def install() -> list[torch.library.Library]:
    return [_install(name) for name in OPERATORS]
