"""Class H: compiled blocks and async TP. Most of these shipped once: see the links in `faults.toml`."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem
from torch._inductor.fx_passes import micro_pipeline_tp

from harness.worker.compiled import blocks
from harness.worker.faults.seams import wrap
from harness.worker.virtual.collectives import resolved


def symmetric_memory_not_enabled() -> None:
    """The pass is on, but nobody enables symmetric memory for the TP group."""
    wrap(symm_mem, "enable_symm_mem_for_group", lambda _: lambda group_name: None)


def fusion_pass_off() -> None:
    """Async TP is asked for and its pass is not switched on."""

    def make(stock: Any) -> Any:
        def enable_async_tp(*args: Any) -> None:
            stock(*args)
            torch._inductor.config._micro_pipeline_tp = False

        return enable_async_tp

    wrap(blocks, "enable_async_tp", make)


def scatters_not_recognized() -> None:
    """The pass no longer knows the way from a matmul over [batch, sequence] to its reduce-scatter."""

    def make(stock: Any) -> Any:
        def find(node: torch.fx.Node) -> Any:
            return None if node.target is torch.ops.aten.reshape.default else stock(node)

        return find

    wrap(micro_pipeline_tp, "_find_producer_matmul", make)


def operand_taken_before_its_reshape() -> None:
    """A is taken from before the reshape to two dims, its scale from after it."""

    def make(stock: Any) -> Any:
        def from_match(match: list[torch.fx.Node]) -> Any:
            matmul = stock(match)
            if matmul.pre_mm_reshape is not None:
                matmul.A_node = matmul.pre_mm_reshape.args[0]
            return matmul

        return from_match

    wrap(micro_pipeline_tp._ScaledMatmul, "from_match", lambda stock: staticmethod(make(stock)))


def output_shape_forgotten() -> None:
    """A is the collapsed operand and so is the output: the leading dims are never given back."""

    def make(stock: Any) -> Any:
        def from_match(match: list[torch.fx.Node]) -> Any:
            matmul = stock(match)
            matmul.post_mm_reshape = None
            return matmul

        return from_match

    wrap(micro_pipeline_tp._ScaledMatmul, "from_match", lambda stock: staticmethod(make(stock)))


def scattered_dim_not_moved_back() -> None:
    """The dim that is moved to the front to be scattered stays there: batch and sequence change places."""

    def make(stock: Any) -> Any:
        def impl(scatter_dim: int, **rest: Any) -> torch.Tensor:
            result: torch.Tensor = stock(scatter_dim=scatter_dim, **rest)
            return result.movedim(scatter_dim, 0).reshape(result.shape)

        return impl

    wrap(symm_mem, "_fused_matmul_reduce_scatter_impl", make)


def scatter_dim_of_the_flat_operand() -> None:
    """The fused operator scatters the output along the dim of its collapsed operand."""

    def make(stock: Any) -> Any:
        def insert(graph: Any, matmul: Any, op: str, dim: int, *rest: Any) -> Any:
            group, flat_dim, shape = rest
            return stock(graph, matmul, op, flat_dim, group, flat_dim, shape)

        return insert

    wrap(micro_pipeline_tp, "_insert_fused_matmul_reduce_scatter", make)


def scatter_averages() -> None:
    """The fused operator averages over TP ranks what it must sum."""

    def make(stock: Any) -> Any:
        return lambda graph, matmul, op, *rest: stock(graph, matmul, "avg", *rest)

    wrap(micro_pipeline_tp, "_insert_fused_matmul_reduce_scatter", make)


def row_scales_of_the_first_chunk() -> None:
    """Every chunk of the pipelined operator is dequantized by the row scales of the first."""

    def make(stock: Any) -> Any:
        def impl(**given: Any) -> Any:
            scale = given["A_scale"]
            if scale.numel() > 1:
                ranks = resolved(given["group_name"]).size()
                first = scale.flatten(0, -2).chunk(ranks)[0]
                given["A_scale"] = first.repeat(ranks, 1).view(scale.shape)
            return stock(**given)

        return impl

    wrap(symm_mem, "_fused_scaled_matmul_reduce_scatter_impl", make)


def gathered_chunks_swapped() -> None:
    """The pipelined all-gather consumes the chunk of one rank as that of the next."""

    def make(stock: Any) -> Any:
        def gather_and_consume(shard: Any, consume: Any, output: Any, group_name: Any, needed: bool = True) -> None:
            ranks = resolved(group_name).size()
            stock(shard, lambda chunk, rank: consume(chunk, (rank + 1) % ranks), output, group_name, needed)

        return gather_and_consume

    wrap(symm_mem, "_pipelined_multi_all_gather_and_consume", make)


def produced_chunks_swapped() -> None:
    """The pipelined reduce-scatter sends every rank the chunk of the next one."""

    def make(stock: Any) -> Any:
        def produce_and_exchange(produce: Any, output: Any, group_name: Any, dim: int = 0) -> None:
            ranks = resolved(group_name).size()
            stock(lambda rank, chunk: produce((rank + 1) % ranks, chunk), output, group_name, dim)

        return produce_and_exchange

    wrap(symm_mem, "_pipelined_produce_and_all2all", make)


def blocks_not_compiled() -> None:
    """The blocks stay eager: nothing is compiled although the case asks for it."""
    wrap(blocks.torch, "compile", lambda _: lambda block, **__: block)
