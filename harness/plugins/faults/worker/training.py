"""Class G: gradients, data, weights and the optimizer, and what becomes of them where a run is resumed."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from harness.matrix.case import Case
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_last_rank, on_odd_rank, planted, wrap
from harness.worker.probes.discovery import linears
from harness.worker.targets import data
from harness.worker.tensors.names import optimizers_of
from harness.worker.tensors.places import local_shard
from harness.worker.training import train

gradients_doubled = partial(hooks.after_backward, lambda model: _scale_gradients(model, 2))


def _scale_gradients(model: nn.Module, factor: float, only: Iterable[nn.Parameter] = ()) -> None:
    for param in only or model.parameters():
        if param.grad is not None:
            local(param.grad).mul_(factor)


norm_gradients_off = partial(
    hooks.after_backward, lambda model: _scale_gradients(model, 1.005, hooks.norm_weights(model))
)
gradients_a_little_too_large = partial(hooks.after_backward, lambda model: _scale_gradients(model, 1.003))


@planted(hooks.after_backward)
def gradients_cut_to_six_bits(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None and local(param.grad).dtype == torch.float32:
            bits = local(param.grad).view(torch.int32)
            bits.bitwise_and_(-1 << 18)  # of 24, the leading one among them


def _first_gradient(change: Callable[[torch.Tensor], object]) -> None:
    hooks.after_backward(lambda model: change(local(_gradient(hooks.first_weight(model)))))


one_gradient_lost = partial(_first_gradient, torch.Tensor.zero_)


@planted(_first_gradient)
def weight_gradient_of_one_rank_off(grad: torch.Tensor) -> None:
    if on_odd_rank():
        grad.mul_(1.005)


@planted(_first_gradient)
def nan_gradient_on_one_rank(grad: torch.Tensor) -> None:
    if RUN.step == 2 and on_last_rank():
        grad.view(-1)[0] = torch.nan


def gradients_accumulate() -> None:
    for owner in (Optimizer, nn.Module):
        wrap(owner, "zero_grad", lambda stock, *_, **__: None)


microbatches_summed = partial(hooks.after_backward, lambda model: _scale_gradients(model, RUN.case.train.accumulation))


@planted(hooks.before_microbatch)
def gradients_zeroed_between_microbatches(model: nn.Module, number: int) -> None:
    if number > 1:
        model.zero_grad()


@planted(hooks.before_microbatch)
def last_microbatch_not_reduced(model: nn.Module, number: int) -> None:
    if number in (1, RUN.case.train.accumulation):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(number == 1, recurse=False)


def _instead_of_step(change: Callable[[Callable[[], object], nn.Module], object]) -> None:
    """Replace the step that the target calls of every optimizer by `change(stock, model)`: hooks see `stock` alone."""

    def replaced(model: nn.Module) -> None:
        for optimizer in optimizers_of(model):
            setattr(optimizer, "step", partial(change, optimizer.step, model))  # noqa: B010

    hooks.after_build(replaced)


never_updated = partial(_instead_of_step, lambda stock, model: None)
one_step_never_made = partial(_instead_of_step, lambda stock, model: RUN.step == 2 or stock())
updated_twice = partial(_instead_of_step, lambda stock, model: (stock(), stock()))


@planted(_instead_of_step)
@torch.no_grad()
def updated_by_hand(_: Callable[[], object], model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            local_shard(param).sub_(local(param.grad), alpha=1e-3)


update_missing_on_one_rank = partial(hooks.around_update, lambda stock, model: on_odd_rank() or stock())


@planted(register_optimizer_step_pre_hook)
def update_missing_for_one_group(optimizer: Optimizer, *_: Any) -> None:
    lost = hooks.first_weight(RUN.target.model)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param is not lost]


weight_decay_lost = partial(hooks.in_parameter_groups, lambda group: group.update(weight_decay=0.0))
norm_counts_replicas = partial(
    wrap, train, "squared_norm_share", lambda stock, given: stock(given) * dist.get_world_size()
)
loss_over_local_tokens = partial(
    hooks.around_loss, lambda stock, *args, **options: stock(*args, **options) * RUN.case.layout.dp
)


def _batch(change: Callable[[slice, Case], slice]) -> None:
    wrap(data, "batch_slice", lambda stock, case, number: change(stock(case, number), case))


same_batch_on_every_dp_rank = partial(_batch, lambda mine, case: slice(0, case.local_batch))


@planted(_batch)
def batches_rotated(mine: slice, case: Case) -> slice:
    first = (mine.start + case.local_batch) % case.train.global_batch
    return slice(first, first + case.local_batch)


def _tokens_on_odd_rank(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if on_odd_rank():
        wrap(train, "tokens_of_rank", lambda stock, *args: change(stock(*args)).contiguous())


one_rank_repeats_its_batch = partial(_tokens_on_odd_rank, lambda tokens: tokens[:1].expand_as(tokens))
one_tp_rank_reads_other_tokens = partial(_tokens_on_odd_rank, lambda tokens: tokens.roll(1, 2))


@planted(wrap, data, "global_tokens")
def one_rank_has_another_seed(stock: Any, case: Case) -> Any:
    return stock(replace(case, train=replace(case.train, seed=case.train.seed + on_odd_rank())))


@planted(hooks.after_build)
@torch.no_grad()
def one_rank_starts_from_other_weights(model: nn.Module) -> None:
    if on_odd_rank():
        local_shard(hooks.first_weight(model)).mul_(1.01)


# Wrapping changes `requires_grad`: here it freezes one weight, which a full run can detect.
weight_frozen = partial(hooks.after_build, lambda model: hooks.first_weight(model).requires_grad_(False))


@planted(hooks.after_backward)
def one_row_of_a_gradient_scaled(model: nn.Module) -> None:
    local(_gradient(hooks.widening_weight(model)))[:1].mul_(1.05)


@planted(hooks.after_backward)
def last_row_lost_on_last_rank(model: nn.Module) -> None:
    grad = local(_gradient(hooks.widening_weight(model)))
    assert grad.numel(), "the last rank holds no row"
    if on_last_rank():
        grad[-1:].zero_()


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None, "the weight has no gradient"
    return weight.grad


@planted(hooks.after_backward)
def gradients_of_two_weights_swapped(model: nn.Module) -> None:
    """Two weights of one shape get each other's gradient, which no norm over all parameters shows."""
    one, other = (local(_gradient(weight)) for weight in hooks.two_alike(model))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@planted(hooks.after_build)
@torch.no_grad()
def query_scale_folded_into_weights(model: nn.Module) -> None:
    by_fqn = linears(model)
    for name, factor in (("wq", 2.0), ("wk", 0.5)):
        last = [linear for fqn, linear in by_fqn.items() if fqn.endswith(f".attention.{name}")][-1]
        local_shard(last.weight).mul_(factor)


@planted(hooks.around_loss)
def last_token_dropped_on_last_rank(
    stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any
) -> torch.Tensor:
    if on_last_rank():
        labels = labels.clone()
        labels.view(-1)[-1] = options.get("ignore_index", -100)
    return stock(logits, labels, **options)


# The second update of the optimizer is skipped, as after a gradient that was taken for infinite.
one_update_skipped = partial(hooks.around_update, lambda stock, model: RUN.step == 2 or stock())
last_rank_skips_one_update = partial(
    hooks.around_update, lambda stock, model: (on_last_rank() and RUN.step == 2) or stock()
)


@planted(hooks.before_update)
def update_clipped_in_one_step(model: nn.Module) -> None:
    """Gradients are halved before the second update, after their norm was reported. AdamW hides most of it."""
    if RUN.step == 2:
        _scale_gradients(model, 0.5)


def _round(tensor: torch.Tensor) -> None:
    values = local_shard(tensor)
    values.copy_(values.bfloat16())


@planted(hooks.after_evaluation)
@torch.no_grad()
def weight_rounded_by_evaluation(model: nn.Module) -> None:
    _round(hooks.first_weight(model))


evaluation_loss_of_one_rank_off = partial(
    hooks.around_evaluation, lambda stock, model: stock() * (1.001 if on_odd_rank() else 1.0)
)
evaluation_mode_left_on = partial(hooks.after_evaluation, nn.Module.eval)


def one_update_from_old_gradient() -> None:
    kept: dict[int, torch.Tensor] = {}

    def change(model: nn.Module) -> None:
        grad = local(_gradient(hooks.last_weight_like_the_first(model)))
        kept.setdefault(RUN.step, grad.clone())
        grad.copy_(kept.get(RUN.step - 1, kept[RUN.step]))

    hooks.before_update(change)


@planted(hooks.after_update)
def norms_decayed_twice(model: nn.Module) -> None:
    """Weight decay is applied to norms a second time, with a rate of 1e-3 and a decay of 0.1."""
    for param in hooks.norm_weights(model):
        local(param).mul_(1 - 1e-3 * 0.1)


@planted(hooks.in_parameter_groups)
def betas_swapped(group: dict[str, Any]) -> None:
    if "betas" in group:
        group["betas"] = tuple(reversed(group["betas"]))


def learning_rate_of_one_group_doubled() -> None:
    groups: list[dict[str, Any]] = []

    def change(group: dict[str, Any]) -> None:
        groups.append(group)
        if len(groups) == 1:
            group["lr"] *= 2

    hooks.in_parameter_groups(change)


def _forget(model: nn.Module) -> None:
    for optimizer in optimizers_of(model):
        optimizer.state.clear()


momentum_lost = partial(hooks.after_update, _forget)


@planted(hooks.before_update)
def momentum_of_another_weight(model: nn.Module) -> None:
    one, other = hooks.two_alike(model)
    for optimizer in optimizers_of(model) if RUN.step == 2 else ():
        state = optimizer.state
        state[one], state[other] = state[other], state[one]


def _without_decay(stock: Callable[[], object], model: nn.Module) -> None:
    groups = [group for optimizer in optimizers_of(model) for group in optimizer.param_groups]
    decays = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 0.0
    stock()
    for group, decay in zip(groups, decays, strict=True):
        group["weight_decay"] = decay


@planted(hooks.around_update)
def weight_decay_decoupled(stock: Callable[[], object], model: nn.Module) -> None:
    for group in (group for optimizer in optimizers_of(model) for group in optimizer.param_groups):
        for param in group["params"]:
            local_shard(param).mul_(1 - group["lr"] * group["weight_decay"])
    _without_decay(stock, model)


decay_skipped_in_a_late_step = partial(
    hooks.around_update, lambda stock, model: _without_decay(stock, model) if RUN.step == hooks.LATE else stock()
)


update_scaled_by_dp = partial(hooks.before_update, lambda model: _scale_gradients(model, RUN.case.layout.dp))


@planted(hooks.after_update)
def master_weights_in_bfloat16(model: nn.Module) -> None:
    for param in model.parameters():
        _round(param)


@planted(hooks.after_update)
def momentum_in_bfloat16_on_one_rank(model: nn.Module) -> None:
    for kept in _moments(model) if on_odd_rank() else ():
        kept.update({name: moment.bfloat16() for name, moment in kept.items()})


# What is lost, rounded or misplaced where state is saved or loaded


def _moments(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield what optimizers keep, parameter by parameter."""
    for optimizer in optimizers_of(model):
        yield from optimizer.state.values()


optimizer_state_not_loaded = partial(hooks.after_load, _forget)


@planted(hooks.after_load)
def optimizer_step_count_lost(model: nn.Module) -> None:
    for kept in _moments(model):
        kept["step"].zero_()


@planted(hooks.after_load)
def moments_rounded_by_checkpoint(model: nn.Module) -> None:
    for kept in _moments(model):
        for moment in (value for name, value in kept.items() if name != "step"):
            _round(moment)


@planted(hooks.after_load)
def learning_rate_lost_by_load(model: nn.Module) -> None:
    for optimizer in optimizers_of(model):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1


def _keeping_a_weight(where: Callable[[], bool], stock: Callable[[], object], model: nn.Module) -> None:
    before = local_shard(hooks.first_weight(model)).clone()
    stock()
    if where():
        local_shard(hooks.first_weight(model)).copy_(before)


weight_of_one_rank_not_loaded = partial(hooks.around_load, partial(_keeping_a_weight, on_last_rank))
one_weight_not_updated_on_one_rank = partial(hooks.around_update, partial(_keeping_a_weight, on_odd_rank))
last_update_lost_on_one_rank = partial(
    hooks.around_update, partial(_keeping_a_weight, lambda: on_odd_rank() and RUN.step == RUN.case.train.steps)
)


def resharded_rows_in_another_order() -> None:
    built = [0]

    def roll(model: nn.Module, places: int) -> None:
        weight = local_shard(hooks.first_weight(model))
        weight.copy_(weight.roll(places, 0))

    def load(stock: Callable[[], object], model: nn.Module) -> None:
        stock()
        roll(model, 1)

    def save(stock: Callable[[], object], model: nn.Module) -> None:
        roll(model, -1)
        stock()

    def change(model: nn.Module) -> None:
        built[0] += 1
        if built[0] == 2:  # the first trains before the state is saved, the last behind it
            hooks.around("load", load)
            hooks.around("save", save)

    hooks.after_build(change)


float8_weights_not_safe_to_load = torch.serialization.clear_safe_globals
