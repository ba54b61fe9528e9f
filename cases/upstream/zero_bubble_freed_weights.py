"""A pipeline of two stages with FSDP2: gradients of the last stage by schedule and reshard_after_forward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

STAGES, MICROBATCHES = 2, 4  # both stages on one rank, with FSDP2 on a mesh of one


def gradients(schedule, *, reshard_after_forward):
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (1,))
    modules = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(STAGES)]
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    stages = [PipelineStage(module, i, STAGES, torch.device("cpu")) for i, module in enumerate(modules)]
    x, target = torch.randn(2, 8, 16)
    schedule(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss).step(x, target=target)
    grads = [parameter.grad for parameter in modules[-1].parameters()]
    return [None if grad is None else round(grad.full_tensor().norm().item(), 4) for grad in grads]


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lost = False
for freed in (False, True):
    expected = gradients(ScheduleInterleaved1F1B, reshard_after_forward=freed)
    actual = gradients(ScheduleInterleavedZeroBubble, reshard_after_forward=freed)
    print(f"reshard_after_forward={freed}: norms of gradients")
    print("expected:", expected, "(ScheduleInterleaved1F1B)")
    print("actual:  ", actual, "(ScheduleInterleavedZeroBubble)")
    lost |= actual != expected
raise SystemExit(lost)
