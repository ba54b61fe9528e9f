"""Activation checkpointing of transformer blocks: torchtitan's three modes and its list of saved operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from harness.matrix.case import Checkpointing

_aten = torch.ops.aten

# torchtitan 0.2.2, models/llama3/infra/parallelize.py, without operators that this model never calls (flex and varlen
# attention, inductor_compiled_code).
SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        _aten.max.default,
    }
)


def apply_checkpointing(layers: nn.ModuleDict, checkpointing: Checkpointing) -> None:
    """Wrap the blocks in place, before FSDP is applied, as in torchtitan."""
    for index, (name, block) in enumerate(list(layers.items()), start=1):
        if checkpointing.mode == "selective_op":
            layers[name] = checkpoint_wrapper(block, context_fn=_selective_contexts)
        elif checkpointing.mode == "full" or (
            checkpointing.mode == "selective_layer" and index % checkpointing.every == 0
        ):
            layers[name] = checkpoint_wrapper(block)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy(defaultdict(int)))


def _policy(mm_count: defaultdict[bool, int]) -> Callable[..., CheckpointPolicy]:
    def save_every_second_mm(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func is _aten.mm.default:
            mm_count[context.is_recompute] += 1
            if mm_count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return save_every_second_mm
