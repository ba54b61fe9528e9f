"""A pipeline of two stages with float8 linears: scaled matmuls of one step by schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torchao.float8 import convert_to_float8_training

STAGES, MICROBATCHES = 2, 4  # both stages on one rank; the first never splits its backward pass
calls, scaled_mm = [], torch._scaled_mm


def counted(*args, **kwargs):
    calls.append(args[0].shape)
    return scaled_mm(*args, **kwargs)


def matmuls(schedule):
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16() for _ in range(STAGES)]
    tokens = torch.empty(32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    stages = [
        PipelineStage(convert_to_float8_training(module), i, STAGES, torch.device("cpu"), (tokens,), (tokens,))
        for i, module in enumerate(modules)
    ]
    x, target = torch.randn(2, 32 * MICROBATCHES, 64).bfloat16()
    calls.clear()
    schedule(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss).step(x, target=target)
    return len(calls)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch._scaled_mm = counted
expected, actual = matmuls(ScheduleInterleaved1F1B), matmuls(ScheduleInterleavedZeroBubble)
print("expected:", expected, "scaled matmuls (ScheduleInterleaved1F1B)")
print("actual:  ", actual, "scaled matmuls (ScheduleInterleavedZeroBubble)")
raise SystemExit(actual != expected)
