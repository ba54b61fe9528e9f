"""Applies the `float8` part of a case with torchao: converts linears, before any parallelism is applied."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

from harness.matrix.case import Float8
from harness.matrix.linears import OUTPUT_FQN


def float8_config(float8: Float8) -> Float8LinearConfig:
    """torchao's config for a recipe other than bf16. FP8 is never emulated."""
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        enable_fsdp_float8_all_gather=float8.fp8_all_gather,
        pad_inner_dim=float8.pad_inner_dim,
    )


def convert(model: nn.Module, float8: Float8) -> None:
    """Replace the linears of `model` by Float8Linear in place, except for the filtered ones."""
    filters = set(float8.filter_fqns) if float8.output_layer else {*float8.filter_fqns, OUTPUT_FQN}
    if float8.enabled:
        convert_to_float8_training(
            model,
            config=float8_config(float8),
            module_filter_fn=lambda _, fqn: not any(entry in fqn for entry in filters),
        )


@torch.no_grad()
def after_optimizer_step(model: nn.Module, float8: Float8) -> None:
    """Update the precomputed weight scales if the case asks for them."""
    if float8.precompute_scale:
        precompute_float8_dynamic_scale_for_fsdp(model)
