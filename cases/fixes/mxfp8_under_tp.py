"""Candidate fix for torch 2.13 and torchao 0.18: MXFP8 linears under tensor parallelism.

    fp8-harness run tp2-mxfp8-v2048-s2-b16 --inject cases/fixes/mxfp8_under_tp.py:apply

The matmul is dispatched on DTensors: torch checks its blocked scales as if no shard had padding, and has no strategy
for operands that are sharded along the contracted dim. Here each rank multiplies its shards with the scales of their
blocks, and the result is placed as that of a matmul in high precision. torchao's sharding rule of the cast along the
last dim gets the parameter that FLOOR passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torchao.prototype.mx_formats import mx_tensor

# By the placements of the operands along one mesh dim.
_PLACED: dict[tuple[Placement, Placement], Placement] = {
    (Replicate(), Replicate()): Replicate(),
    (Shard(0), Replicate()): Shard(0),
    (Replicate(), Shard(1)): Shard(1),
    (Shard(1), Shard(0)): Partial(),
}


def apply() -> None:
    """Patch torchao in this process."""
    register_sharding(torch.ops.torchao.triton_to_mxfp8_dim0.default)(_cast_of_shards)
    module: Any = mx_tensor
    stock = module._addmm_mx_dispatch

    def of_shards(a: Any, b: Any, operator: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None or not isinstance(a.qdata, DTensor):
            result: torch.Tensor = stock(a, b, operator, bias)
            return result
        placements = [_PLACED[pair] for pair in zip(a.qdata.placements, b.qdata.placements, strict=True)]
        local = stock(_local(a), _local(b), operator)
        shape = torch.Size((a.shape[0], b.shape[1]))
        return DTensor.from_local(
            local, a.qdata.device_mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
        )

    module._addmm_mx_dispatch = of_shards


def _local(whole: Any) -> Any:
    data, scale = whole.qdata.to_local(), whole.scale.to_local()
    options = (whole.kernel_preference, whole.act_quant_kwargs, whole.is_swizzled_scales)
    return mx_tensor.MXTensor(data, scale, whole.elem_dtype, whole.block_size, whole.orig_dtype, *options)


def _cast_of_shards(x: object, inner_block_size: int = 32, scaling_mode: str = "rceil") -> list[Any]:
    placements = (Replicate(), Shard(0), Shard(1))
    return [([placement, placement], [placement, None, None]) for placement in placements]
