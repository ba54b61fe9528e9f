"""Classes C, D and G: the dtype of sharded parameters, and biases, which TP shards with outputs or holds everywhere."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Partial
from torchao.float8.float8_linear import Float8Linear

from harness.plugins.faults.worker.hooks import (
    RUN,
    after_backward,
    after_build,
    local,
    planted,
    wrap,
)
from harness.worker.probes.discovery import linears


def _sharded_as(dtype: torch.dtype) -> None:
    def init(stock: Any, sharded: FSDPParam, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
        stock(sharded, cast, *args, **kwargs)

    wrap(FSDPParam, "_init_sharded_param", init)


parameters_kept_in_float32 = partial(_sharded_as, torch.float32)
parameters_sharded_in_bfloat16 = partial(_sharded_as, torch.bfloat16)


@planted(wrap, Float8Linear, "from_float")
def bias_lost_in_conversion(stock: Any, *args: Any, **kwargs: Any) -> Float8Linear:
    converted = stock(*args, **kwargs)
    converted.bias = None
    return converted


@planted(wrap, Partial, "_partition_value")
def bias_added_by_every_tp_rank(stock: Any, placement: Partial, tensor: torch.Tensor, *args: Any) -> Any:
    return tensor if placement.reduce_op == "sum" else stock(placement, tensor, *args)


@planted(after_backward)
def bias_gradient_divided_by_tp(model: nn.Module) -> None:
    for linear in _with_whole_bias(model):
        _gradient(linear).div_(RUN.case.layout.tp)


def bias_gradient_of_own_positions() -> None:
    sums: dict[nn.Linear, list[torch.Tensor]] = defaultdict(list)

    def watch(linear: nn.Linear, _: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: sums[linear].append(_of_own_positions(grad)))

    def attach(model: nn.Module) -> None:
        for linear in _with_whole_bias(model):
            linear.register_forward_hook(watch, prepend=True)

    def change(model: nn.Module) -> None:
        for linear, gradients in sums.items():
            _gradient(linear).copy_(torch.stack(gradients).sum(0))
        sums.clear()

    after_build(attach)
    after_backward(change)


def _of_own_positions(grad: torch.Tensor) -> torch.Tensor:
    """Of the gradient [batch, positions, features] of a sum over TP ranks, which every rank has whole: [features]."""
    assert isinstance(grad, DTensor), "the output of the linear is summed over TP ranks"
    mesh = grad.device_mesh
    return local(grad).chunk(mesh.size(), dim=1)[mesh.get_local_rank()].sum((0, 1))


def _gradient(linear: nn.Linear) -> torch.Tensor:
    assert linear.bias.grad is not None, "biases are trained"
    return local(linear.bias.grad)


def _with_whole_bias(model: nn.Module) -> Iterator[nn.Linear]:
    """The linears whose bias every TP rank holds whole."""
    for linear in linears(model).values():
        if isinstance(linear.bias, DTensor) and linear.bias.placements[-1].is_replicate():
            yield linear
