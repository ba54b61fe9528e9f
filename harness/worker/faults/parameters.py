"""Class G: the dtype of the parameters that FSDP2 shards and the optimizer updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from harness.worker.faults.hooks import wrap


def parameters_kept_in_float32() -> None:
    """Parameters of bfloat16 are cast to float32 before they are sharded."""
    _sharded_as(torch.float32)


def parameters_sharded_in_bfloat16() -> None:
    """Parameters are sharded, and updated, in the bfloat16 in which they are gathered."""
    _sharded_as(torch.bfloat16)


def _sharded_as(dtype: torch.dtype) -> None:
    def init(stock: Any, sharded: FSDPParam, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
        stock(sharded, cast, *args, **kwargs)

    wrap(FSDPParam, "_init_sharded_param", init)
