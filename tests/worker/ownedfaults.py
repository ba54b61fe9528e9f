"""What can go wrong with operands that a trainer owns, each planted at its seam by a function."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from harness.worker.probes.fsdp_params import fsdp_params
from tests.worker import ownedprogram
from tests.worker.ownedprogram import Operands, Shard, cast, quantize

Tensor = torch.Tensor


def refill_forgotten(model: nn.Module) -> None:
    Shard.refill = lambda shard, operands, made: None


def orientation_not_refilled(model: nn.Module) -> None:
    def refill(shard: Shard, operands: Operands, made: Operands) -> None:
        operands.forward.copy_(made.forward)
        operands.forward_scale.copy_(made.forward_scale)

    Shard.refill = refill


def scale_not_refilled(model: nn.Module) -> None:
    def refill(shard: Shard, operands: Operands, made: Operands) -> None:
        for name in ("forward", "backward", "backward_scale"):
            getattr(operands, name).copy_(getattr(made, name))

    Shard.refill = refill


def refilled_by_another_recipe(model: nn.Module) -> None:
    def refill(shard: Shard, operands: Operands, made: Operands) -> None:
        other = made.backward_scale.amax().expand_as(made.backward_scale)
        for operand, tensor in zip(operands, (*made[:3], other), strict=True):
            operand.copy_(tensor)

    Shard.refill = refill


def _sent(change: Any) -> None:
    stock = Shard.fsdp_pre_all_gather

    @functools.wraps(stock)  # FSDP2 looks at the parameters
    def sent(shard: Shard, *args: Any) -> Any:
        (rows,), size = stock(shard, *args)
        return (change(shard, rows),), size

    Shard.fsdp_pre_all_gather = sent


def other_rows_gathered(model: nn.Module) -> None:
    _sent(lambda shard, rows: rows.flip(0))


def first_weight_gathered_again(model: nn.Module) -> None:
    first: dict[int, Tensor] = {}
    _sent(lambda shard, rows: first.setdefault(id(shard), rows.clone()))


def gathered_in_half(model: nn.Module) -> None:
    _sent(lambda shard, rows: rows.half())


def padding_in_scales(model: nn.Module) -> None:
    gathered: list[Tensor] = []

    def cut(shard: Shard, whole: Tensor, rows: int) -> Tensor:
        gathered[:] = [whole]
        return whole[:rows]

    def quantized(shard: Shard, weight: Tensor) -> Operands:
        _, scale = cast(gathered[0].t().contiguous())
        return quantize(weight)._replace(backward_scale=scale)

    Shard.cut, Shard.quantize = cut, quantized


def quantized_twice(model: nn.Module) -> None:
    stock = Shard.refill

    def refill(shard: Shard, operands: Operands, made: Operands) -> None:
        quantize(shard.rows.new_ones(operands.forward.shape))
        stock(shard, operands, made)

    Shard.refill = refill


def quantized_for_every_microbatch(model: nn.Module) -> None:
    def begin(model: Any, microbatch: int) -> None:
        if microbatch:
            for module in (*model, model):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._sharded_state = ShardedState.SHARDED
            for param in fsdp_params(model):
                param.sharded_state = ShardedState.SHARDED
                param._setattr_on_modules(param.sharded_param)

    ownedprogram.begin = begin


def step_without_reshard(model: nn.Module) -> None:
    def begin(model: Any, microbatch: int) -> None:
        stock(model, microbatch)
        model.set_reshard_after_backward = lambda *_: nn.Module
        for module in (*model, model):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.reshard_after_backward = False

    stock = ownedprogram.begin
    ownedprogram.begin = begin


def memory_used_before_backward(model: nn.Module) -> None:
    def between(model: nn.Module) -> None:
        for param in fsdp_params(model):
            for tensor in param._unsharded_inner_tensors:
                if tensor.untyped_storage().nbytes():
                    tensor.view(torch.uint8).fill_(1)

    ownedprogram.between = between


def _free(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def operands_not_freed(model: nn.Module) -> None:
    FSDPParam.free_unsharded_param = lambda param: _free(param.all_gather_outputs)


def gathered_weight_not_freed(model: nn.Module) -> None:
    FSDPParam.free_all_gather_outputs = lambda param: None  # torch 2.15
    FSDPParam.free_unsharded_param = lambda param: _free(param._unsharded_inner_tensors)


def operands_copied_for_use(model: nn.Module) -> None:
    ownedprogram.of_use = lambda weight: Operands(*(operand.clone() for operand in weight.operands))
