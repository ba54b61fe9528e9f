"""Class C: the wrong modules are converted, or with the wrong configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from harness.worker.discovery import converted_linears
from harness.worker.faults.hooks import after_build, on_odd_rank, wrap
from harness.worker.targets.reference import float8 as reference_float8
from harness.worker.targets.target import Target

Filter = Callable[[nn.Module, str], bool]


def _filter(change: Callable[[Filter], Filter]) -> None:
    """Replace the module filter of the conversion by `change(filter)`."""

    def make(stock: Any) -> Any:
        def convert(model: nn.Module, *, config: Any, module_filter_fn: Filter) -> nn.Module:
            return stock(model, config=config, module_filter_fn=change(module_filter_fn))

        return convert

    wrap(reference_float8, "convert_to_float8_training", make)


def _config(change: Callable[[Float8LinearConfig], Float8LinearConfig]) -> None:
    """Replace the torchao configuration by `change(config)`."""
    wrap(reference_float8, "float8_config", lambda stock: lambda float8: change(stock(float8)))


def nothing_converted() -> None:
    """The conversion is never called."""
    wrap(reference_float8, "convert_to_float8_training", lambda stock: lambda model, **_: model)


def conversion_reverted() -> None:
    """Every Float8Linear is turned back into nn.Linear after the conversion."""

    def change(target: Target) -> None:
        for linear in converted_linears(target.model).values():
            linear.__class__ = nn.Linear

    after_build(change)


def filter_of_a_renamed_module() -> None:
    """The filter of the output layer names no existing module, so the layer is converted."""
    reference_float8.OUTPUT_FQN = "lm_head"


def filter_split_into_letters() -> None:
    """A filter string is treated as a list of characters, at least one of which is in every name."""
    _filter(lambda stock: lambda module, fqn: not any(letter in fqn for letter in "output"))


def filter_of_another_predicate() -> None:
    """Another filter than the computed one is used: w2 stays in high precision."""
    _filter(lambda stock: lambda module, fqn: stock(module, fqn) and not fqn.endswith("w2"))


def filter_sees_single_modules() -> None:
    """The filter is called without the name of the module, so all modules are converted."""
    _filter(lambda stock: lambda module, fqn: stock(module, ""))


def one_rank_leaves_a_linear_out() -> None:
    """One rank numbers layers differently and leaves w2 of the first block in high precision."""
    left_out = "layers.0.feed_forward.w2"
    _filter(lambda stock: lambda module, fqn: stock(module, fqn) and not (on_odd_rank() and fqn == left_out))


def linear_bypasses_float8() -> None:
    """A Float8Linear multiplies in high precision because its forward is bypassed."""

    def make(stock: Any) -> Any:
        def forward(module: Float8Linear, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, module.weight) if module.out_features < module.in_features else stock(module, x)

        return forward

    wrap(Float8Linear, "forward", make)


def recipe_lost() -> None:
    """The recipe name is dropped, so the default, tensorwise, is used."""
    _config(
        lambda config: Float8LinearConfig(
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather, pad_inner_dim=config.pad_inner_dim
        )
    )


def weight_gradient_in_float8() -> None:
    """A recipe that should compute the weight gradient in high precision computes it in float8."""
    _config(lambda config: Float8LinearConfig.from_recipe_name("rowwise"))


def weight_gradient_in_high_precision() -> None:
    """The weight gradient of the rowwise recipe is computed in high precision."""
    _config(lambda config: Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))


def gradient_cast_to_e4m3() -> None:
    """A cast config shared by all operands makes the output gradient e4m3 instead of e5m2."""
    shared = CastConfig(target_dtype=torch.float8_e4m3fn)
    _config(
        lambda config: dataclasses.replace(
            config, cast_config_grad_output=shared, cast_config_grad_output_for_grad_weight=shared
        )
    )


def fp8_all_gather_flag_lost() -> None:
    """The flag for the fp8 all-gather is ignored after a rename: weights are gathered in high precision."""
    _config(lambda config: dataclasses.replace(config, enable_fsdp_float8_all_gather=False))


def padding_flag_lost() -> None:
    """The flag for padding the contraction dim is ignored."""
    _config(lambda config: dataclasses.replace(config, pad_inner_dim=False))
