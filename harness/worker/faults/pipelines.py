"""Class L: pipelines. Their stages, the order of microbatches, and what is sent from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.worker.faults.hooks import RUN, before_casts, planted, wrap
from harness.worker.probes.places import local_shard
from harness.worker.targets.reference import build, pipeline
from harness.worker.virtual.collectives import Receive

Tensor = torch.Tensor
_RECEIVED = "_retrieve_recv_activations", "_retrieve_recv_grads"  # of a stage, by microbatch


def _other(number: int) -> int:
    """The first microbatch in place of the second."""
    return 0 if number == 1 else number


@planted(wrap, _PipelineStageBase, _RECEIVED[0])
def microbatch_received_twice(stock: Any, stage: Any, number: int) -> Any:
    received = stock(stage, number)
    for mine, first in zip(received, stage.args_recv_info[_other(number)], strict=True):
        if first.buffer is not None:
            mine.data.copy_(first.buffer.data)
    return received


@planted(wrap, _PipelineStageBase, _RECEIVED[1])
def gradient_of_another_microbatch(stock: Any, stage: Any, number: int) -> Any:
    return stock(stage, _other(number))


@planted(wrap, _PipelineStageBase, _RECEIVED[1])
def gradient_of_last_microbatch_lost(stock: Any, stage: Any, number: int) -> Any:
    received = stock(stage, number)
    return tuple(each * (number < RUN.case.train.accumulation - 1) for each in received)


@planted(wrap, _PipelineStageBase, _RECEIVED[1])
def gradient_of_first_microbatch_added_twice(stock: Any, stage: Any, number: int) -> Any:
    return tuple(each * (2 if number == 0 else 1) for each in stock(stage, number))


@planted(wrap, schedules._PipelineSchedule, "_maybe_compute_loss")
def labels_of_microbatches_swapped(stock: Any, *args: Any) -> None:
    schedule, stage, output, labels, number, *rest = args
    stock(schedule, stage, output, labels, number ^ 1, *rest)


def gradients_divided_by_microbatches() -> None:
    def train(stock: Any, pipelined: Any, batches: Sequence[Any]) -> Any:
        pipelined.schedule.scale_grads = True
        return stock(pipelined, batches)

    wrap(pipeline.Pipeline, "train", train)


@planted(wrap, build.ReferenceTarget, "loss_of_stage")
def loss_is_mean_of_microbatches(stock: Any, *args: Any) -> Tensor:
    loss: Tensor = stock(*args) / RUN.case.train.accumulation
    return loss


@planted(wrap, build, "clip_gradients")
def clipped_by_norm_of_own_stage(stock: Any, optimizer: torch.optim.Optimizer, max_norm: float, pp: Any) -> Any:
    return stock(optimizer, max_norm, None)


def _sent(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Send `change(tensor)` in place of what stages send."""

    def sending(stock: Any, stage: Any, number: int) -> Any:
        sent = stock(stage, number)
        for each in sent:
            each.tensor = change(each.tensor.detach())
        return sent

    wrap(_PipelineStageBase, name, sending)


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


activations_sent_in_float8 = partial(_sent, "get_fwd_send_ops", _rounded)
gradients_sent_with_few_bits = partial(
    _sent, "get_bwd_send_ops", lambda tensor: (tensor * 2.0**20).to(torch.float8_e5m2).to(tensor.dtype) / 2.0**20
)
activations_sent_in_another_dtype = partial(_sent, "get_fwd_send_ops", lambda tensor: tensor.to(torch.float16))


@planted(wrap, _PipelineStageBase, "perform_reduce_grad")
def gradients_of_pipeline_not_reduced(stock: Any, stage: Any, factor: int) -> None:
    """FSDP2 is never told that the last microbatch is through."""
    for each in stage.submod.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


@planted(wrap, FSDPModule, "set_requires_gradient_sync")
def pipeline_reduces_every_microbatch(stock: Any, module: Any, asked: bool, **options: Any) -> None:
    stock(module, True, **options)


@planted(wrap, build, "keep_part")
def stages_hold_each_others_blocks(stock: Any, model: Any, case: Any, rank: int) -> None:
    """The blocks of a stage are those of the stage on the other side of the pipeline."""
    stock(model, case, rank)
    last = case.model.shape.layers - 1
    model.layers = nn.ModuleDict({f"{last - int(name)}": block for name, block in model.layers.items()})


def activation_read_before_it_arrives() -> None:
    """The second microbatch that a stage receives in a step is still the one of the step before."""
    waited = [0, 0]  # in this step, the step

    def wait(stock: Any, work: Any) -> None:
        if waited[1] != RUN.step:
            waited[:] = [0, RUN.step]
        receives = any(isinstance(each, Receive) for each in work)
        waited[0] += receives
        if RUN.step == 1 or waited[0] != 2 or not receives:
            stock(work)

    wrap(schedules, "_wait_batch_p2p", wait)


def input_scale_of_first_microbatch() -> None:
    """A linear scales the inputs of every microbatch of a step by the amax of the first."""
    running: list[Float8Linear] = []
    scales: dict[tuple[Float8Linear, int], Tensor] = {}

    def forward(stock: Any, linear: Float8Linear, given: Tensor) -> Tensor:
        running.append(linear)
        found: Tensor = stock(linear, given)
        running.pop()
        return found

    def change(scale: Tensor, tensor: Tensor, role: Any) -> Tensor:
        return scales.setdefault((running[-1], RUN.step), scale) if running and role is GemmInputRole.INPUT else scale

    wrap(Float8Linear, "forward", forward)
    before_casts(change)


@planted(wrap, _PipelineStageBase, "get_fwd_send_ops")
def microbatch_sent_twice(stock: Any, stage: Any, number: int) -> Any:
    sent = stock(stage, number)
    return sent * 2 if number == 0 else sent


@planted(wrap, _PipelineStageBase, "forward_one_chunk")
def weights_change_between_microbatches(stock: Any, stage: Any, number: int, *args: Any, **options: Any) -> Any:
    if number == RUN.case.train.accumulation - 1:
        with torch.no_grad():
            local_shard(next(stage.submod.parameters())).mul_(1.001)
    return stock(stage, number, *args, **options)


def outputs_of_stages_kept() -> None:
    kept: list[Any] = []

    def forward(stock: Any, *args: Any, **options: Any) -> Any:
        found = stock(*args, **options)
        kept.append(found)
        return found

    wrap(_PipelineStageBase, "forward_one_chunk", forward)
