"""Pipeline parallelism: the stages of this rank, and a schedule of torch that sends microbatches through them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from harness.matrix.case import Case
from harness.matrix.linears import modules_of_stage, stage_count, stages_of
from harness.worker.targets.reference.loss import Batch
from harness.worker.targets.reference.model import Llama
from harness.worker.virtual.collectives import NAMES

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
_OF_SEVERAL = ("interleaved", "zero_bubble")  # schedules that get a list of stages

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def part_of_rank(model: Llama, case: Case, rank: int) -> Llama:
    return model.part([name for stage in stages_of(case, rank) for name in modules_of_stage(case, stage)])


def cut(model: Llama, case: Case, rank: int) -> list[Llama]:
    """The stages of this rank, which share the modules of `model`: `model` itself where it has one."""
    stages = stages_of(case, rank)
    return [model] if len(stages) == 1 else [model.part(modules_of_stage(case, stage)) for stage in stages]


class Pipeline:
    """Trains the stages of this rank, with the loss and gradients of the last stage."""

    def __init__(self, parts: Sequence[Llama], case: Case, mesh: DeviceMesh, loss: Loss, rank: int) -> None:
        device = next(parts[0].parameters()).device
        train, sharded = case.train, case.layout.tp if case.layout.sequence_parallel else 1
        tokens = torch.empty(case.microbatch, train.seq_len, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            case.microbatch,
            train.seq_len // sharded,
            case.model.shape.dim,
            dtype=getattr(torch, train.dtype),
            device="meta",
            requires_grad=True,
        )
        stages = [
            PipelineStage(
                part,
                stage,
                stage_count(case.layout),
                device,
                input_args=tokens if stage == 0 else hidden,
                output_args=hidden,
                group=mesh.get_group(),
            )
            for part, stage in zip(parts, stages_of(case, rank), strict=True)
        ]
        self._first, self._last = stages[0].is_first, stages[-1].is_last
        self._stages: Sequence[Any] = stages
        NAMES.add(self)
        name = case.layout.schedule
        self.schedule = SCHEDULES[name](
            stages if name in _OF_SEVERAL else stages[0], train.accumulation, loss_fn=loss, scale_grads=False
        )

    def name(self, tensor: torch.Tensor) -> str | None:
        """What a stage receives into a tensor; None where none does."""
        for stage in self._stages:
            sides = ("input", stage.args_recv_info), ("output gradient", stage.grad_recv_info)
            for side, by_microbatch in sides:
                for number, infos in by_microbatch.items():
                    buffers = (getattr(info, "buffer", None) for info in infos)
                    if any(buffer is not None and buffer.data_ptr() == tensor.data_ptr() for buffer in buffers):
                        return f"the {side} of stage {stage.stage_index} for microbatch {number + 1}"
        return None

    def train(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Forward and backward of all microbatches. Returns their losses where this rank has the last stage."""
        return self._run(self.schedule.step, batches)

    def evaluate(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """The same without backward."""
        return self._run(self.schedule.eval, batches)

    def _run(self, schedule: Callable[..., Any], batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = [torch.cat([batch.inputs for batch in batches])] if self._first else []
        labels = torch.cat([batch.labels for batch in batches]) if self._last else None
        try:
            schedule(*inputs, target=labels, losses=losses if self._last else None, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch tells of the arguments of a stage, this is what went wrong in it
        return [loss.detach() for loss in losses]
