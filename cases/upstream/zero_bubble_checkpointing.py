"""A pipeline of two stages with a checkpointed block each: how often the block of the last stage is computed."""

import functools
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

STAGES, MICROBATCHES = 2, 4  # both stages on one rank
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Block(nn.Sequential):
    def __init__(self, **options):
        super().__init__(*(nn.Linear(16, 16) for _ in range(4)))
        self.calls, self.options = 0, options

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False, **self.options)

    def compute(self, x):
        self.calls += 1
        return super().forward(x)


def calls(schedule, **options):
    blocks = [Block(**options) for _ in range(STAGES)]
    rows = torch.empty(2, 16, device="meta", requires_grad=True)
    stages = [PipelineStage(block, i, STAGES, torch.device("cpu"), (rows,), (rows,)) for i, block in enumerate(blocks)]
    x, target = torch.randn(2, 8, 16)
    try:
        schedule(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss).step(x, target=target)
    except RuntimeError as error:
        return str(error)
    return f"{blocks[-1].calls / MICROBATCHES:g} for each microbatch"


logging.disable(logging.ERROR)  # the schedule prints its steps
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrong = False
for name, options in {"full": {}, "selective": {"context_fn": SELECTIVE}}.items():
    expected, actual = calls(ScheduleInterleaved1F1B, **options), calls(ScheduleInterleavedZeroBubble, **options)
    print(f"{name} checkpointing")
    print("expected:", expected, "(ScheduleInterleaved1F1B)")
    print("actual:  ", actual, "(ScheduleInterleavedZeroBubble)")
    wrong |= actual != expected
raise SystemExit(wrong)
