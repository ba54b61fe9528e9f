"""What can be chosen: the sizes of the model, the layout over ranks, FP8, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Float8:
    """FP8 by torchao: the name of a recipe, and how FSDP2 gathers the weights."""

    recipe: str
    all_gather: bool = False  # FSDP2 gathers weights in float8
    precompute_scale: bool = False  # the scales of these weights, all at once after the update
    pad_inner_dim: bool = False
    filter_fqns: tuple[str, ...] = ()  # linears whose name contains one of these stay in high precision


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. The defaults train on a single process, without FP8."""

    vocab_size: int = 2048
    dim: int = 128
    layers: int = 2
    heads: int = 8
    hidden: int = 512
    seq_len: int = 64

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    fsdp: bool = False  # FSDP2 on one data-parallel rank too, for its mixed precision

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16: of FSDP2's mixed precision
    float8: Float8 | None = None
    checkpoint_blocks: bool = False
    compile_backend: str | Callable[..., Any] | None = None

    accumulate: int = 2  # microbatches of one update
    lr: float = 3e-3
    max_norm: float = 1.0  # gradients are clipped to this norm; math.inf: they are not

    @property
    def uses_fsdp(self) -> bool:
        """True when the parameters are FSDP2's."""
        return self.fsdp or self.dp_replicate * self.dp_shard > 1
