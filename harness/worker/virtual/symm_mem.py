"""Async TP on the CPU: the fused operators of `symm_mem`, over any process group.

torch implements the four operators for CUDA only. Here the CPU gets the same Python implementations, in two variants:
`fallback` is torch's reference (a collective, then a matmul), `pipelined` is torch's chunk and scale logic with another
transport: a GPU copies from the symmetric memory of its peers, chunk by chunk on two streams, while here one collective
of the group exchanges all chunks at once. Chunks are consumed and produced in torch's order.

Not modeled: stream order, races on symmetric buffers, and the kernels for NVLink multicast and CUTLASS.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad

from harness.worker.dispatch_hooks.collectives import resolve_group
from harness.worker.dispatch_hooks.fused import OPERATORS, naming


def run(operator: str, given: dict[str, Any]) -> Any:
    """Run torch's CUDA implementation of a fused operator on `given`, its arguments by schema name.

    It is looked up at call time, so that patches apply. Arguments are passed by position because it renames the first
    one, and lists are copied because one implementation writes to a list.
    """
    positional, named = [], {}
    for argument in getattr(torch.ops.symm_mem, operator).default._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        value = list(value) if isinstance(value, list) else value
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return getattr(symm_mem, f"_{operator}")(*positional, **named)


def _kernel(operator: str) -> Callable[..., Any]:
    given = naming(getattr(torch.ops.symm_mem, operator).default)
    return lambda *args, **kwargs: run(operator, given(args, kwargs))


CPU_KERNELS: dict[str, Callable[..., Any]] = {operator: _kernel(operator) for operator in OPERATORS}


def install() -> None:
    """Replace the transport, and let the fusion pass run in a build of torch without NCCL."""
    module: Any = symm_mem
    module._pipelined_multi_all_gather_and_consume = _multi_all_gather_and_consume
    module._pipelined_produce_and_all2all = _produce_and_all2all
    module._pipelined_all_gather_and_consume_last_dim = _unsupported
    module.is_symm_mem_enabled_for_group = _is_enabled(module.is_symm_mem_enabled_for_group)
    # post_grad imported the pass by name
    passes: Any = post_grad
    passes.micro_pipeline_tp_pass = _with_nccl(micro_pipeline_tp.micro_pipeline_tp_pass)


def _is_enabled(stock: Callable[[str], bool]) -> Callable[[str], bool]:
    """Wrap the test of a group: since torch 2.15 every known group has symmetric memory, where an accelerator is."""
    known: Callable[[str], bool] | None = getattr(symm_mem, "_is_process_group_registered", None)

    @functools.wraps(stock)
    def is_symm_mem_enabled_for_group(group_name: str) -> bool:
        return stock(group_name) or (known is not None and not symm_mem._is_test_mode and known(group_name))

    return is_symm_mem_enabled_for_group


@contextmanager
def reference() -> Iterator[None]:
    """While active, the fused operators run torch's reference (`fallback`)."""
    before = symm_mem._is_test_mode
    symm_mem._is_test_mode = True
    try:
        yield
    finally:
        symm_mem._is_test_mode = before


def enable_async_tp(group: dist.ProcessGroup, *, fallback: bool) -> None:
    """Enable the fusion pass, and symmetric memory for the group of TP, without which the pass silently fuses nothing.

    `fallback`: run torch's reference from now on, with symmetric memory enabled for this group only.
    """
    torch._inductor.config._micro_pipeline_tp = True
    if fallback:
        symm_mem._is_test_mode = True
        symm_mem._mocked_group_names = {group.group_name}
    else:
        symm_mem.enable_symm_mem_for_group(group.group_name)


def _with_nccl(fuse: Callable[[torch.fx.Graph], None]) -> Callable[[torch.fx.Graph], None]:
    """Wrap the fusion pass to run without NCCL, where it would silently do nothing."""

    @functools.wraps(fuse)
    def micro_pipeline_tp_pass(graph: torch.fx.Graph) -> None:
        available = dist.is_nccl_available
        dist.is_nccl_available = lambda: True
        try:
            fuse(graph)
        finally:
            dist.is_nccl_available = available

    return micro_pipeline_tp_pass


def _multi_all_gather_and_consume(
    shard: list[torch.Tensor],
    shard_consumer: Callable[[list[torch.Tensor], int], None],
    ag_out: list[torch.Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """All-gather every `shard` into its `ag_out`, then consume the shards, starting with this rank's."""
    group = resolve_group(group_name)
    rank, size = group.rank(), group.size()
    for part, whole in zip(shard, ag_out, strict=True):
        assert part.is_contiguous() and whole.is_contiguous(), "shards and outputs of the all-gather must be contiguous"
        assert whole.shape == (part.shape[0] * size, *part.shape[1:]), "an output must hold the shards of all ranks"
        dist.all_gather_into_tensor(whole, part, group=group)
    pieces = [whole.chunk(size) for whole in ag_out]
    for step in range(size):
        source = (rank + step) % size
        shard_consumer([chunks[source] for chunks in pieces], source)


def _produce_and_all2all(
    chunk_producer: Callable[[int, torch.Tensor], None],
    output: torch.Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """Produce a chunk for every rank, starting with the next and ending with this one, and write those received."""
    group = resolve_group(group_name)
    rank, size = group.rank(), group.size()
    chunks = output.chunk(size, dim=out_chunk_dim)
    produced = output.new_empty(size, *chunks[0].shape)
    for step in range(1, size + 1):
        target = (rank + step) % size
        chunk_producer(target, produced[target])
    received = torch.empty_like(produced)
    dist.all_to_all_single(received, produced, group=group)
    for chunk, part in zip(chunks, received, strict=True):
        chunk.copy_(part)


def _unsupported(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the virtual device does not support a fused all-gather along the last dim")
