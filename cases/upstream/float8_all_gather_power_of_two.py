"""round_scales_to_power_of_2 with and without the float8 all-gather of FSDP2: the scale of the same weight."""

import torch
import torch.distributed as dist
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, bias=False))
whole = model[0].weight.detach().clone()
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, round_scales_to_power_of_2=True)
convert_to_float8_training(model, config=config)
without = hp_tensor_to_float8_dynamic(  # as Float8Linear.forward casts a weight that no FSDP2 has gathered in float8
    whole, torch.float8_e4m3fn, model[0].linear_mm_config, round_scales_to_power_of_2=config.round_scales_to_power_of_2
)
(gathered,) = model[0].weight.fsdp_pre_all_gather(dist.init_device_mesh("cpu", (1,)))[1]
print("expected: scale", without._scale.item(), "= 2 **", without._scale.log2().item())
print("actual:   scale", round(gathered.item(), 3), "= 2 **", round(gathered.log2().item(), 3))
raise SystemExit(gathered.item() != without._scale.item())
