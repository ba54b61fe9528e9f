"""Class C: the wrong modules are converted, or with the wrong configuration. Of classes D and G too: the dtype of
sharded parameters, and biases, which TP shards with outputs or holds everywhere.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Partial
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training, float8_linear_utils
from torchao.float8.float8_linear import Float8Linear

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_odd_rank, planted, wrap, wrap_everywhere
from harness.worker.probes.discovery import converted_linears, linears


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


@planted(hooks.after_backward)
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

    hooks.after_build(attach)
    hooks.after_backward(change)


def _of_own_positions(grad: torch.Tensor) -> torch.Tensor:
    """Of the gradient [batch, positions, features] of a sum over TP ranks, which every rank has whole: [features]."""
    assert isinstance(grad, DTensor), "the output of the linear is summed over TP ranks"
    mesh = grad.device_mesh
    return local(grad).chunk(mesh.size(), dim=1)[mesh.get_local_rank()].sum((0, 1))


def _gradient(linear: nn.Linear) -> torch.Tensor:
    assert linear.bias.grad is not None, "biases are trained"
    return local(linear.bias.grad)


def _with_whole_bias(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linears whose bias every TP rank holds whole."""
    for linear in linears(model).values():
        if isinstance(linear.bias, DTensor) and linear.bias.placements[-1].is_replicate():
            yield linear


Filter = Callable[[nn.Module, str], bool]


def _conversion(convert: Callable[..., nn.Module]) -> None:
    """Replace the conversion by `convert(stock, model, from_float, filter)`."""

    def swap(stock: Any, module: nn.Module, from_float: Any, *, module_filter_fn: Filter | None = None) -> nn.Module:
        return convert(stock, module, from_float, module_filter_fn or (lambda *_: True))

    wrap_everywhere(float8_linear_utils, "swap_linear_layers", swap)


def _filter(change: Callable[[Filter, dict[str, nn.Linear]], Filter]) -> None:
    """Replace the module filter of the conversion by `change(filter, the linears of the model)`."""
    _conversion(
        lambda stock, model, from_float, wanted: stock(
            model, from_float, module_filter_fn=change(wanted, linears(model))
        )
    )


def _config(change: Callable[[Float8LinearConfig], Float8LinearConfig]) -> None:
    """Replace the torchao configuration of every linear by `change(config)`."""
    changed = functools.cache(change)  # one object for all linears, as it was

    def from_float(stock: Any, cls: Any, linear: nn.Linear, config: Float8LinearConfig | None = None) -> Any:
        return stock(cls, linear, changed(config or Float8LinearConfig()))

    wrap(Float8Linear, "from_float", from_float)


converted_unasked = partial(hooks.after_build, convert_to_float8_training)
nothing_converted = partial(_conversion, lambda stock, model, *_: model)


@planted(hooks.after_build)
def conversion_reverted(model: nn.Module) -> None:
    for linear in converted_linears(model).values():
        linear.__class__ = nn.Linear


@planted(_filter)
def filter_of_a_renamed_module(stock: Filter, by_fqn: dict[str, nn.Linear]) -> Filter:
    left_out = [fqn for fqn, linear in by_fqn.items() if not stock(linear, fqn)][-1:]
    return lambda module, fqn: stock(module, fqn) or fqn in left_out


filter_split_into_letters = partial(
    _filter, lambda stock, by_fqn: lambda module, fqn: not any(letter in fqn for letter in "output")
)


@planted(_filter)
def filter_of_another_predicate(stock: Filter, by_fqn: dict[str, nn.Linear]) -> Filter:
    """Another filter than the computed one is used: the second linear of every MLP stays in high precision."""
    name = _module_name(hooks.narrowing_linear(by_fqn))
    return lambda module, fqn: stock(module, fqn) and _module_name(fqn) != name


filter_sees_single_modules = partial(_filter, lambda stock, by_fqn: lambda module, fqn: stock(module, ""))


@planted(_filter)
def one_rank_leaves_a_linear_out(stock: Filter, by_fqn: dict[str, nn.Linear]) -> Filter:
    """Leave the second linear of the first MLP in high precision on one rank, which numbers layers differently."""
    name = _module_name(hooks.narrowing_linear(by_fqn))
    left_out = next(fqn for fqn in by_fqn if _module_name(fqn) == name)
    return lambda module, fqn: stock(module, fqn) and not (on_odd_rank() and fqn == left_out)


def _module_name(fqn: str) -> str:
    return fqn.rpartition(".")[2]


@planted(wrap, Float8Linear, "forward")
def linear_bypasses_float8(stock: Any, module: Float8Linear, x: torch.Tensor) -> Any:
    narrows = module.out_features < module.in_features
    return F.linear(x, module.weight, module.bias) if narrows else stock(module, x)


recipe_lost = partial(
    _config,
    lambda config: Float8LinearConfig(
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather, pad_inner_dim=config.pad_inner_dim
    ),
)
weight_gradient_in_float8 = partial(_config, lambda config: Float8LinearConfig.from_recipe_name("rowwise"))
weight_gradient_in_high_precision = partial(
    _config, lambda config: Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
)


_OF_GRAD_OUTPUT = ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight")


@planted(_config)
def gradient_cast_to_e4m3(config: Float8LinearConfig) -> Float8LinearConfig:
    return dataclasses.replace(config, **dict.fromkeys(_OF_GRAD_OUTPUT, CastConfig(target_dtype=torch.float8_e4m3fn)))


@planted(_config)
def config_of_grad_output_ignored(config: Float8LinearConfig) -> Float8LinearConfig:
    right = {name: getattr(config, name) for name in _OF_GRAD_OUTPUT}
    wrong = {name: dataclasses.replace(cast, target_dtype=torch.float8_e5m2) for name, cast in right.items()}
    return dataclasses.replace(config, **wrong)


granularities_swapped = partial(
    _config,
    lambda config: dataclasses.replace(
        config, cast_config_input=config.cast_config_weight, cast_config_weight=config.cast_config_input
    ),
)
fp8_all_gather_flag_lost = partial(
    _config, lambda config: dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
)
compiled_scales_no_powers_of_two = partial(
    _config, lambda config: dataclasses.replace(config, round_scales_to_power_of_2=False)
)
padding_flag_lost = partial(_config, lambda config: dataclasses.replace(config, pad_inner_dim=False))
