"""Pipeline parallelism: the stages of this rank, and a schedule of torch that sends microbatches through them.

The first stage of tied ends has the weights of the embedding, the last a copy for the output layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from harness.matrix.case import Case
from harness.matrix.dims.pp import ends_are_one, modules_of_stage, stage_count, stages_of
from harness.worker.targets.reference.loss import Batch
from harness.worker.targets.reference.model import Llama
from harness.worker.targets.target import World
from harness.worker.tensors.places import local_shard
from harness.worker.tensors.reduction import reduced_gradient
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
    """Return the stages of this rank, which share the modules of `model`: `model` itself where it has one."""
    stages = stages_of(case, rank)
    return [model] if len(stages) == 1 else [model.part(modules_of_stage(case, stage)) for stage in stages]


class Pipeline:
    """Trains the stages of this rank, with the loss and gradients of the last stage."""

    def __init__(self, parts: Sequence[Llama], case: Case, mesh: DeviceMesh, loss: Loss, rank: int) -> None:
        device = next(parts[0].parameters()).device
        train, sharded = case.train, case.layout.shares_of_sequence
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
        """Return what a stage receives into a tensor; None if none does."""
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
        """Return the losses without a backward pass."""
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


def in_copies(case: Case, world: World) -> bool:
    """Return True if ends are tied by copies: in a pipeline, and on the single rank that is its reference."""
    return world.plays.copied_ends or (case.model.tied and not ends_are_one(case))


class CopiedEnds:
    """Keeps copies equal: every one is updated with the sum of the gradients of both, as in Megatron."""

    def __init__(self, model: Llama, pp: DeviceMesh | None) -> None:
        self.model = model
        self._group = None if pp is None else pp.get_group()

    @property
    def copy(self) -> nn.Parameter | None:
        """Return the weights of the output layer where this rank has it: no others than those of the embedding."""
        return None if self.model.output is None else _weight(self.model.output)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Call it behind the last backward of a step: what ranks hold of gradients is reduced."""
        ends = (module for module in (self.model.tok_embeddings, self.model.output) if module is not None)
        mine = [_local_gradient(_weight(module)) for module in ends]
        if len(mine) == 2:
            total = mine[0] + mine[1]
            for grad in mine:
                grad.copy_(total)
        elif mine:
            mine[0] += self.of_other_end(mine[0].contiguous())

    def of_other_end(self, grad: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "a rank with one end is a rank of a pipeline"
        is_first = dist.get_rank(self._group) == 0
        peer = dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1 if is_first else 0)
        other = torch.empty_like(grad)
        sent = dist.P2POp(dist.isend, grad, peer, self._group)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, peer, self._group)]):
            work.wait()
        return other


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _local_gradient(weight: nn.Parameter) -> torch.Tensor:
    """Return what this rank has of a gradient, which it holds as it holds the weight."""
    weight.grad = reduced_gradient(weight)
    assert weight.grad is not None, "both ends have computed backward"
    return local_shard(weight.grad)
