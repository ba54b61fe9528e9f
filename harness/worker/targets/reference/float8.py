"""Applies the `float8` part of a case with torchao: converts linears, before parallelism is applied or after TP is.

What is of torchao's prototype, MXFP8 and experts, is imported where a case uses it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.float8 import (
    CastConfig,
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.quantization import quantize_

from harness.matrix.case import Float8
from harness.matrix.linears import EXPERTS, OUTPUT_FQN, ROUTER
from harness.matrix.recipes import OPERAND_FIELDS, ROW, RecipeTraits
from harness.worker.targets.reference.model import Llama


def float8_config(float8: Float8) -> Float8LinearConfig:
    """torchao's config for a recipe other than bf16. FP8 is never emulated."""
    config = Float8LinearConfig.from_recipe_name(float8.recipe)
    return dataclasses.replace(
        config,
        **(_casts(config, float8.traits) if float8.casts else {}),
        enable_fsdp_float8_all_gather=float8.fp8_all_gather,
        pad_inner_dim=float8.pad_inner_dim,
    )


def _casts(config: Float8LinearConfig, traits: RecipeTraits) -> dict[str, CastConfig]:
    """Return one config per operand, because torchao changes its arguments."""
    gradients = getattr(torch, traits.grad_output_dtype)
    return {
        field: CastConfig(
            scaling_type=ScalingType.DYNAMIC if traits.casts[operand] else ScalingType.DISABLED,
            scaling_granularity=ScalingGranularity["AXISWISE" if traits.block_of(operand) == ROW else "TENSORWISE"],
            target_dtype=gradients if operand.startswith("go") else getattr(config, field).target_dtype,
        )
        for operand, field in OPERAND_FIELDS.items()
    }


def convert(model: nn.Module, float8: Float8) -> None:
    """Convert the linears of `model` in place, except for the filtered ones and routers."""
    filters = {*float8.filter_fqns, ROUTER} | (set() if float8.output_layer else {OUTPUT_FQN})

    def wanted(_: nn.Module, fqn: str) -> bool:
        return not any(entry in fqn for entry in filters)

    if float8.enabled:
        _CONVERTERS[float8.traits.kernel](model, float8, wanted)


_Wanted = Callable[[nn.Module, str], bool]


def _convert_float8(model: nn.Module, float8: Float8, wanted: _Wanted) -> None:
    convert_to_float8_training(model, config=float8_config(float8), module_filter_fn=wanted)


def _convert_mxfp8(model: nn.Module, float8: Float8, wanted: _Wanted) -> None:
    """Replace the linears of `model` by MXFP8Linear, or wrap their weights, in place, where `wanted(module, fqn)`."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    options = _mxfp8_options(float8)
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {fqn: module for fqn, module in linears.items() if wanted(module, fqn)}
    if float8.conversion == "wrapper":
        quantize_(model, MXFP8TrainingOpConfig(**options), filter_fn=lambda _, fqn: fqn in chosen)
        return
    for linear in chosen.values():  # keeps its parameters and the hooks of tensor parallelism
        linear.__class__ = MXFP8Linear
        for name, value in options.items():
            setattr(linear, name, value)


def _convert_blockwise(model: nn.Module, _: Float8, wanted: _Wanted) -> None:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig

    quantize_(
        model, Float8BlockwiseLinearConfig(), lambda module, fqn: type(module) is nn.Linear and wanted(module, fqn)
    )


_CONVERTERS = {"float8": _convert_float8, "mx": _convert_mxfp8, "blockwise": _convert_blockwise}


def _mxfp8_options(float8: Float8) -> dict[str, Any]:
    """As GPUs run MXFP8, never emulated."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    return {
        "kernel_preference": KernelPreference.AUTO,
        "scale_calculation_mode": ScaleCalculationMode["FLOOR" if float8.traits.rounds_scales_down else "RCEIL"],
        "wgrad_with_hp": not float8.traits.multiplies("wgrad"),
    }


def convert_experts(model: Llama, float8: Float8) -> None:
    """Wrap the weights of experts in place, so that their grouped matmuls are those of the recipe."""
    if not float8.grouped_mm:
        return
    quantize_(model, _grouped_config(float8), filter_fn=lambda _, fqn: fqn.endswith(EXPERTS))
    for moe in model.mixtures():
        moe.experts.multiple = float8.traits.group_multiple


def _grouped_config(float8: Float8) -> AOBaseConfig:
    """torchao's config for the grouped matmuls of experts. They pad their groups themselves (`experts.py`)."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig

    return MXFP8TrainingOpConfig(**_mxfp8_options(float8)) if float8.traits.kernel == "mx" else Float8TrainingOpConfig()


@torch.no_grad()
def after_optimizer_step(model: nn.Module, float8: Float8) -> None:
    """Update the precomputed weight scales if the case asks for them."""
    if float8.precompute_scale:
        precompute_float8_dynamic_scale_for_fsdp(model)
