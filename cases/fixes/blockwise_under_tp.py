"""Candidate fix for torchao 0.18: blockwise float8 linears under tensor parallelism.

    fp8-harness run tp2-blockwise-dim.256-ffn.512-v2048-s2-b16 --inject cases/fixes/blockwise_under_tp.py:apply

In the weight gradient the second operand has one scale for 128 values of a column. `scaled_mm` takes those scales with
columns first, so they are sharded along the other dim than the operand. Here the sharding rule of the matmul says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torchao.prototype.blockwise_fp8_training.kernels import BLOCKWISE_1X128_SCALING_TYPE


def apply() -> None:
    """Patch torchao in this process."""
    register_sharding(torch.ops.torchao.blockwise_scaled_mm.default)(_shardings)


def _shardings(*arguments: Any) -> list[Any]:
    *_, recipe_b, _ = arguments
    columns_first = recipe_b == BLOCKWISE_1X128_SCALING_TYPE.value
    columns, rows = (Shard(0), Shard(1)) if columns_first else (Shard(1), Shard(0))
    return [
        ([Replicate()], [Replicate(), Replicate(), Replicate(), None, Replicate(), None, None]),
        ([Shard(0)], [Shard(0), Replicate(), Shard(0), None, Replicate(), None, None]),
        ([Shard(1)], [Replicate(), Shard(1), Replicate(), None, columns, None, None]),
        ([Partial()], [Shard(1), Shard(0), Shard(1), None, rows, None, None]),
    ]
