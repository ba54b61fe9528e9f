"""Makes a model ready for many ranks. The order matters: FP8, tensor parallel, checkpointing, compile, FSDP2."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from tiny_gpt.config import Config, Float8
from tiny_gpt.model import GPT


def distribute(model: GPT, config: Config, device: torch.device) -> None:
    """Apply everything that `config` asks for, in place. The process group must be initialized."""
    mesh = init_device_mesh(
        device.type,
        (config.dp_replicate, config.dp_shard, config.tp),
        mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
    )
    if config.float8 is not None:
        convert_to_float8(model, config.float8)
    if config.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    if config.checkpoint_blocks:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    if config.compile_backend is not None:
        for index, block in enumerate(model.blocks):
            compiled: Any = torch.compile(block, backend=config.compile_backend, fullgraph=True)
            model.blocks[index] = compiled
    if config.uses_fsdp:
        apply_fsdp(model, mesh, config)


def convert_to_float8(model: nn.Module, float8: Float8) -> None:
    """Replace all linears but the output layer, whose weight is the embedding's as well."""
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        enable_fsdp_float8_all_gather=float8.all_gather,
        pad_inner_dim=float8.pad_inner_dim,
    )
    kept = ("lm_head", *float8.filter_fqns)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, fqn: not any(part in fqn for part in kept)
    )


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Split heads and hidden features over the ranks of `mesh`. The rest is on all of them."""
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "attention": whole,
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel()),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def apply_fsdp(model: GPT, mesh: DeviceMesh, config: Config) -> None:
    """FSDP2 of every block and of the rest; HSDP where the model is replicated as well."""
    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dp = mesh["dp_replicate", "dp_shard"] if config.dp_replicate > 1 else mesh["dp_shard"]
    for block in model.blocks:
        fully_shard(block, mesh=dp, mp_policy=policy)
    fully_shard(model, mesh=dp, mp_policy=policy)
