"""Class L: pipelines. Their stages, the order of microbatches, and what is sent from stage to stage.

Of class D too: ends that share their weights, as one parameter or as copies in two stages.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.matrix.dims.pp import holds, modules_of_stage, stages_of
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_last_rank, planted, wrap
from harness.worker.targets.reference import build, pipeline
from harness.worker.targets.reference.loss import Batch
from harness.worker.tensors.places import local_shard
from harness.worker.virtual.collectives import Receive

Tensor = torch.Tensor
_RECEIVED = "_retrieve_recv_activations", "_retrieve_recv_grads"  # of a stage, by microbatch


def _other(number: int) -> int:
    """Return the first microbatch instead of the second."""
    return 0 if number == 1 else number


@planted(wrap, _PipelineStageBase, _RECEIVED[0])
def microbatch_received_twice(stock: Any, stage: Any, number: int) -> Any:
    received = stock(stage, number)
    for mine, first in zip(received, stage.args_recv_info[_other(number)], strict=True):
        if first.buffer is not None:
            mine.data.copy_(first.buffer.data)
    return received


gradient_of_another_microbatch = partial(
    wrap, _PipelineStageBase, _RECEIVED[1], lambda stock, stage, number: stock(stage, _other(number))
)


def _received_times(factor: Callable[[int], int]) -> None:
    """Multiply the gradients that stages receive by `factor(microbatch)`; microbatches count from zero."""

    def retrieve(stock: Any, stage: Any, number: int) -> Any:
        return tuple(gradient * factor(number) for gradient in stock(stage, number))

    wrap(_PipelineStageBase, _RECEIVED[1], retrieve)


gradient_of_last_microbatch_lost = partial(_received_times, lambda number: number < RUN.case.train.accumulation - 1)
gradient_of_first_microbatch_added_twice = partial(_received_times, lambda number: 2 if number == 0 else 1)


@planted(wrap, schedules._PipelineSchedule, "_maybe_compute_loss")
def labels_of_microbatches_swapped(stock: Any, *args: Any) -> None:
    schedule, stage, output, labels, number, *rest = args
    stock(schedule, stage, output, labels, number ^ 1, *rest)


def gradients_divided_by_microbatches() -> None:
    def train(stock: Any, pipelined: Any, batches: Sequence[Any]) -> Any:
        pipelined.schedule.scale_grads = True
        return stock(pipelined, batches)

    wrap(pipeline.Pipeline, "train", train)


evaluation_divided_by_microbatches = partial(
    hooks.wrap_result,
    pipeline.Pipeline,
    "evaluate",
    lambda losses: [loss / RUN.case.train.accumulation for loss in losses],
)


@planted(wrap, schedules._PipelineSchedule, "_initialize_pp_stages")
def backward_not_prepared_behind_evaluation(
    stock: Any, schedule: Any, has_stage: Any, *args: Any, **options: Any
) -> Any:
    """Backward of stages that an evaluation initialized is never prepared."""
    forward, backward = stock(schedule, has_stage, *args, **options)
    return forward, backward or not schedule._has_backward


loss_is_mean_of_microbatches = partial(
    hooks.wrap_result, build.ReferenceTarget, "loss_of_stage", lambda loss: loss / RUN.case.train.accumulation
)
clipped_by_norm_of_own_stage = partial(
    wrap, build, "clip_gradients", lambda stock, model, max_norm, pp, *copy: stock(model, max_norm, None, *copy)
)


def _sent(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Send `change(tensor)` instead of what stages send."""

    def sending(stock: Any, stage: Any, number: int) -> Any:
        sent = stock(stage, number)
        for transfer in sent:
            transfer.tensor = change(transfer.tensor.detach())
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
    for module in stage.submod.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


pipeline_reduces_every_microbatch = partial(
    wrap,
    FSDPModule,
    "set_requires_gradient_sync",
    lambda stock, module, asked, **options: stock(module, True, **options),
)


@planted(wrap, build, "part_of_rank")
def stages_hold_each_others_blocks(stock: Any, model: Any, case: Any, rank: int) -> Any:
    """Give a stage the blocks of the stage at the other end of the pipeline."""
    part = stock(model, case, rank)
    last = case.model.shape.layers - 1
    part.layers = nn.ModuleDict({f"{last - int(name)}": block for name, block in part.layers.items()})
    return part


def activation_read_before_it_arrives() -> None:
    """The second microbatch that a stage receives in a step is still the one of the step before."""
    waited = [0, 0]  # in this step, the step

    def wait(stock: Any, work: Any) -> None:
        if waited[1] != RUN.step:
            waited[:] = [0, RUN.step]
        receives = any(isinstance(operation, Receive) for operation in work)
        waited[0] += receives
        if RUN.step == 1 or waited[0] != 2 or not receives:
            stock(work)

    wrap(schedules, "_wait_batch_p2p", wait)


def _first_scale(wanted: GemmInputRole, since: Callable[[], int]) -> None:
    """A linear scales this operand as it did first, until `since()` is another number."""
    running = hooks.running_linear()
    scales: dict[tuple[Float8Linear, int], Tensor] = {}

    def change(scale: Tensor, tensor: Tensor, role: Any) -> Tensor:
        linear = running()
        return scale if linear is None or role is not wanted else scales.setdefault((linear, since()), scale)

    hooks.before_casts(change)


input_scale_of_first_microbatch = partial(_first_scale, GemmInputRole.INPUT, lambda: RUN.step)
weight_scale_outlives_update = partial(_first_scale, GemmInputRole.WEIGHT, lambda: 1)


def scale_of_latest_microbatch_in_backward() -> None:
    """Backward scales what a linear has saved by what its latest forward had, which may be of another microbatch."""
    running = hooks.running_linear()
    owners: dict[int, Float8Linear] = {}
    latest: dict[Float8Linear, Tensor] = {}

    def change(scale: Tensor, tensor: Tensor, role: Any) -> Tensor:
        if role is not GemmInputRole.INPUT:
            return scale
        if linear := running():
            owners[tensor.data_ptr()], latest[linear] = linear, scale
            return scale
        owner = owners.get(tensor.data_ptr())
        return scale if owner is None else latest[owner]

    hooks.before_casts(change)


microbatch_sent_twice = partial(
    wrap,
    _PipelineStageBase,
    "get_fwd_send_ops",
    lambda stock, stage, number: stock(stage, number) * (2 if number == 0 else 1),
)


@planted(wrap, _PipelineStageBase, "forward_one_chunk")
def weights_change_between_microbatches(stock: Any, stage: Any, number: int, *args: Any, **options: Any) -> Any:
    if number == RUN.case.train.accumulation - 1:
        with torch.no_grad():
            local_shard(next(stage.submod.parameters())).mul_(1.001)
    return stock(stage, number, *args, **options)


def outputs_of_stages_kept() -> None:
    kept: list[Any] = []

    def keep(output: Any) -> Any:
        kept.append(output)
        return output

    hooks.wrap_result(_PipelineStageBase, "forward_one_chunk", keep)


def _without_second_stage(state: dict[str, Any]) -> dict[str, Any]:
    """Return what belongs to no second stage of this rank; all of it where it is no pipeline that loads."""
    case, rank = RUN.case, dist.get_rank()
    if not all(holds(case, rank, name) for name in state["model"]):
        return state
    _, *others = stages_of(case, rank)
    lost = [f".{fqn}." for stage in others for fqn in modules_of_stage(case, stage)]
    return {
        part: {name: value for name, value in values.items() if not any(fqn in f".{name}." for fqn in lost)}
        for part, values in state.items()
    }


def _numbered_by_stage(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the blocks of every rank numbered from zero."""
    first = min(int(name) for name in RUN.target.model.layers)

    def renamed(name: str) -> str:
        return re.sub(r"\blayers\.(\d+)", lambda match: f"layers.{int(match[1]) - first}", name)

    return {part: {renamed(name): value for name, value in values.items()} for part, values in state.items()}


second_stage_of_rank_not_loaded = partial(
    wrap, build, "load", lambda stock, state, **options: stock(_without_second_stage(state), **options)
)


def blocks_saved_under_numbers_of_stage() -> None:
    for name in ("save", "load"):
        wrap(build, name, lambda stock, state, **options: stock(_numbered_by_stage(state), **options))


def groups_of_stages_saved_under_one_name() -> None:
    build._OPTIONS = StateDictOptions()


def loss_divided_after_backward() -> None:
    """The reported loss is right, and gradients are those of a sum over tokens."""
    wrap(build.ReferenceTarget, "loss_of_stage", lambda stock, target, *args: stock(target, *args) * target.tokens)
    wrap(pipeline.Pipeline, "train", lambda stock, *args: [loss / RUN.target.tokens for loss in stock(*args)])


loss_averaged_over_stages = partial(hooks.wrap_result, build, "global_loss", lambda loss: loss / RUN.case.layout.pp)


@planted(wrap, _PipelineStageBase, _RECEIVED[0])
def receive_buffer_reused_before_backward(stock: Any, stage: Any, number: int) -> Any:
    """Overwrite the buffer of a microbatch with the next one before its backward has read it."""
    received = stock(stage, number)
    for mine, before in zip(received, stage.args_recv_info.get(number - 1, ()), strict=False):
        if isinstance(mine, Tensor) and before.buffer is not None:
            before.buffer.data.copy_(mine.data)
    return received


@planted(wrap, build.funcol, "all_reduce")
def norm_is_largest_of_stages(stock: Any, tensor: Any, *args: Any, **options: Any) -> Any:
    stages = RUN.target._meshes.pp.get_group()
    return stock(tensor, "max", stages) if stages in args and not tensor.ndim else stock(tensor, *args, **options)


def labels_of_step_before() -> None:
    before: list[Batch] = []

    def train(stock: Any, pipelined: Any, batches: Sequence[Batch]) -> Any:
        given = [Batch(own.inputs, old.labels) for own, old in zip(batches, before or batches, strict=True)]
        before[:] = batches
        return stock(pipelined, given)

    wrap(pipeline.Pipeline, "train", train)


@planted(hooks.around_update)
def last_stage_updated_one_step_late(stock: Callable[[], Any], model: nn.Module) -> None:
    if RUN.step > 1 or not on_last_rank():
        stock()


@planted(wrap, build, "cut_sequences")
def ends_untied_before_sharding(stock: Any, model: Any, *args: Any) -> Any:
    """As by what gives every module its own parameter: TP, a wrapper of weights, meta devices."""
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    return stock(model, *args)


@planted(wrap, build, "cut_sequences")
def gradient_of_tied_embedding_lost(stock: Any, model: Any, *args: Any) -> Any:
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: _without_gradient(output))
    return stock(model, *args)


def _without_gradient(output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(torch.zeros_like)


copies_keep_their_own_gradients = partial(wrap, pipeline.CopiedEnds, "add_gradients", lambda stock, ends: None)
copy_counted_in_norm = partial(setattr, pipeline.CopiedEnds, "copy", None)


@planted(wrap, pipeline.CopiedEnds, "add_gradients")
def gradients_added_on_first_stage_alone(stock: Any, ends: Any) -> None:
    output = ends.model.output
    own = None if output is None else local(output.weight.grad).clone()
    stock(ends)
    if own is not None and on_last_rank():
        local(output.weight.grad).copy_(own)


@planted(wrap, pipeline.CopiedEnds, "of_other_end")
def gradient_of_other_rows_added(stock: Any, ends: Any, grad: Tensor) -> Tensor:
    """As where stages shard copies of weights in other places."""
    other: Tensor = stock(ends, grad)
    return other.roll(len(other) // 2, 0)
