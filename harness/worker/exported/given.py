"""What a case decides. Flags are gone in a script: what they decide is decided. The other names are its constants."""

from __future__ import annotations

import torch

# Flags
ALWAYS_PARALLEL: bool = False
BIAS: bool = True
CHECKPOINT_ALL: bool = True
CHECKPOINT_OPS: bool = True
CHECKPOINT_SOME: bool = True
COMPILE: bool = True
DP: bool = True
FILTERED: bool = True
FLOAT8_STYLES: bool = True
FP8_ALL_GATHER: bool = True
FSDP: bool = True
HSDP: bool = True
LINEARS: bool = True
LOSS_PARALLEL: bool = True
MIXED_PRECISION: bool = True
PAD_INNER_DIM: bool = True
PRECOMPUTE: bool = True
SEQUENCE_PARALLEL: bool = True
STEPS_BEFORE: bool = True
TP: bool = True

# Constants
VOCAB: int = 64
DIM: int = 32
LAYERS: int = 1
HEAD_DIM: int = 16
KV_DIM: int = 32
FFN: int = 32
STEPS: int = 1
REPLICAS: int = 2  # data-parallel ranks
BATCH: int = 1  # sequences of a data-parallel rank
TOKENS: int = 32
DTYPE: torch.dtype = torch.float32
RECIPE: str = "tensorwise"
NOT_CONVERTED: tuple[str, ...] = ("output",)
AXES: tuple[str, ...] = ("dp_shard", "tp")
DEGREES: tuple[int, ...] = (2, 2)
EVERY: int = 2
DEGREE: int = 2  # of tensor parallelism
FEATURES: int = 16  # of a TP rank
LR: float = 1e-3
LIMIT: float = 0.02
LINEAR_LIMIT: float = 0.02
ERROR: str = "RuntimeError: .*"
