"""Float8 weights that FSDP2 gathered: where a rank's own rows are in them, and its master weights of this moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.worker.probes.cast_numbers import Cast

FSDPParam = Any  # torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam


def gathered_weights(model: nn.Module) -> dict[nn.Module, FSDPParam]:
    """For every module whose weight FSDP2 gathers in float8, what FSDP2 knows of that weight."""
    return {
        param._module_info.module: param
        for param in fsdp_params(model)
        if param._module_info.param_name == "weight"
        and isinstance(param._sharded_local_tensor, WeightWithDynamicFloat8CastTensor)
    }


def fsdp_params(model: nn.Module) -> list[FSDPParam]:
    """What FSDP2 knows of every parameter that it manages."""
    return [
        param
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]


def own_rows(module: nn.Module, param: FSDPParam) -> Cast | None:
    """This rank's rows of the weight that `module` is about to use, its master weights taken for the source.

    None while FSDP2 has not gathered it in float8.
    """
    weight = local_part(module.get_parameter("weight"))
    if not isinstance(weight, Float8TrainingTensor):
        return None
    dim = param.fsdp_placement.dim
    begin = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[dim]
    bits = weight._data.narrow(dim, min(begin, weight._data.size(dim)), param.sharded_size[dim])
    return Cast(param._sharded_local_tensor._tensor, bits, weight._scale, weight._axiswise_dim)


def local_part(tensor: torch.Tensor) -> Any:
    """What this rank holds of a tensor, distributed or not."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local._tensor if isinstance(local, WeightWithDynamicFloat8CastTensor) else local
