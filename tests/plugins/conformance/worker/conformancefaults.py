"""Planted faults of sharding strategies: what a regression of torch or torchao looks like, called in every rank."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torchao.float8 import float8_ops, float8_scaling_utils, float8_utils
from torchao.float8.float8_training_tensor import Float8TrainingTensor

aten = torch.ops.aten
Placed = list[Any]


def _forget(op: Any) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    for table in (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules):
        table.pop(op, None)


def _replace(op: Any, rules: Callable[[Any], list[Placed]]) -> None:
    """Let `op` have these rules per mesh axis: lists of output and input placements."""
    _forget(op)
    register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(1), allow_uneven_sharding=True)(
        lambda _, args, __: rules(args[0])
    )


def amax_without_strategy() -> None:
    for op in (aten.amax.default, aten.max.default):
        _forget(op)


def amax_of_the_shard() -> None:
    """The local amax, called replicated: nobody reduces it."""
    for op in (aten.amax.default, aten.max.default):
        _replace(op, lambda x: [[Replicate(), _ShardingPlaceholder(dim)] for dim in range(len(x.shape))])


def amax_of_pending_parts() -> None:
    """The maximum of the parts of a sum, called the pending maximum of the sum."""
    for op in (aten.amax.default, aten.max.default):
        _replace(
            op,
            lambda x: [
                [Partial("max"), Partial("sum")],
                *([Partial("max"), _ShardingPlaceholder(dim)] for dim in range(len(x.shape))),
            ],
        )


def amax_gathers() -> None:
    """No rule but replicated: right, and as expensive as it gets."""
    for op in (aten.amax.default, aten.max.default):
        _replace(op, lambda _: [])


def abs_keeps_pending() -> None:
    _replace(
        aten.abs.default,
        lambda x: [
            [Partial("sum"), Partial("sum")],
            *([_ShardingPlaceholder(dim), _ShardingPlaceholder(dim)] for dim in range(len(x.shape))),
        ],
    )


def transpose_keeps_its_placement() -> None:
    _replace(aten.t.default, lambda _: [[_ShardingPlaceholder(dim), _ShardingPlaceholder(dim)] for dim in (0, 1)])


def mm_forgets_the_sum() -> None:
    """A contraction over a sharded dim is called replicated."""
    _replace(aten.mm.default, lambda _: [[Replicate(), _ShardingPlaceholder(1), _ShardingPlaceholder(0)]])


def amax_without_abs() -> None:
    def amax(x: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        dim = options.get("axiswise_dim")
        return torch.max(x) if dim is None else torch.amax(x, dim, keepdim=True)

    float8_utils.tensor_to_amax = amax


def scale_of_the_local_tensor() -> None:
    """Every rank scales by the amax of its own shard."""
    stock = float8_utils.tensor_to_scale

    def scale(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return stock(x, *args, **options)
        local = stock(x.to_local(), *args, **options)
        return DTensor.from_local(local, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)

    float8_scaling_utils.tensor_to_scale = scale
    float8_utils.tensor_to_scale = scale


def float8_gathered_in_float32() -> None:
    """A float8 tensor that is dequantized, gathered and cast again: the same bits at four times the bytes."""
    op = torch.ops._c10d_functional.all_gather_into_tensor.default

    def gather(_: Any, args: tuple[Any, ...], kwargs: Any = None) -> Float8TrainingTensor:
        tensor, *rest = args
        data = torch.ops._c10d_functional.wait_tensor(op(tensor._data.float(), *rest))
        return Float8TrainingTensor(
            data.to(tensor._data.dtype),
            tensor._scale,
            tensor._orig_dtype,
            tensor._linear_mm_config,
            tensor._gemm_input_role,
        )

    float8_ops.FLOAT8_OPS_TABLE[op] = gather


def _around_clamp(misbehave: Callable[[], None]) -> None:
    stock = torch.Tensor.clamp

    def clamp(x: torch.Tensor, **limits: Any) -> torch.Tensor:
        if isinstance(x, DTensor) and x.placements == (Shard(0),):
            misbehave()
        return stock(x, **limits)

    torch.Tensor.clamp = clamp  # type: ignore[method-assign]


def one_rank_raises() -> None:
    """Rank 1 alone fails before a collective that the others are in."""

    def fail() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("planted on rank 1")
        dist.all_reduce(torch.zeros(4))

    _around_clamp(fail)


def one_rank_dies() -> None:
    def die() -> None:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGSEGV)

    _around_clamp(die)
