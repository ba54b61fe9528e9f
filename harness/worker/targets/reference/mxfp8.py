"""Applies torchao's conversions for training of its prototype, MXFP8 and experts: as GPUs run them, never emulated."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

from harness.matrix.recipes import Float8


def grouped_config(float8: Float8) -> Float8TrainingOpConfig | MXFP8TrainingOpConfig:
    """torchao's config for the grouped matmuls of experts. They pad their groups themselves (`experts.py`)."""
    return MXFP8TrainingOpConfig(**_options(float8)) if float8.traits.in_blocks else Float8TrainingOpConfig()


def _options(float8: Float8) -> dict[str, Any]:
    return {
        "kernel_preference": KernelPreference.AUTO,
        "scale_calculation_mode": ScaleCalculationMode.FLOOR
        if float8.traits.rounds_scales_down
        else ScaleCalculationMode.RCEIL,
        "wgrad_with_hp": not float8.traits.multiplies("wgrad"),
    }


def convert_mxfp8(model: nn.Module, float8: Float8, wanted: Callable[[nn.Module, str], bool]) -> None:
    """Replace the linears of `model` by MXFP8Linear, or wrap their weights, in place, where `wanted(module, fqn)`."""
    options = _options(float8)
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {fqn: module for fqn, module in linears.items() if wanted(module, fqn)}
    if float8.conversion == "wrapper":
        quantize_(model, MXFP8TrainingOpConfig(**options), filter_fn=lambda _, fqn: fqn in chosen)
        return
    for linear in chosen.values():  # keeps its parameters and the hooks of tensor parallelism
        linear.__class__ = MXFP8Linear
        for name, value in options.items():
            setattr(linear, name, value)
