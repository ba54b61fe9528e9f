"""Float8 weights that FSDP2 gathered: where a rank's own rows are in them, and its master weights of this moment."""

from __future__ import annotations

from torch import nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.worker.probes.cast_numbers import Cast
from harness.worker.probes.fsdp_params import FSDPParam, fsdp_params
from harness.worker.probes.places import local_part, local_tensor


def gathered_weights(model: nn.Module) -> dict[nn.Module, FSDPParam]:
    """For every module whose weight FSDP2 gathers in float8, what FSDP2 knows of that weight."""
    return {
        param._module_info.module: param
        for param in fsdp_params(model)
        if param._module_info.param_name == "weight"
        and isinstance(local_tensor(param.sharded_param), WeightWithDynamicFloat8CastTensor)
    }


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
    return Cast(local_part(param.sharded_param), bits, weight._scale, weight._axiswise_dim)
