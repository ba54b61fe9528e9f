"""What FSDP2 knows of the parameters that it manages."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

ManagedParam = Any  # torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam


def fsdp_params(model: nn.Module) -> list[ManagedParam]:
    return [
        param
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]


def is_gathered(param: ManagedParam) -> bool:
    return param.sharded_state is ShardedState.UNSHARDED
