"""Class G: gradients, data, weights and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from harness.matrix.case import Case
from harness.worker import data, train
from harness.worker.discovery import linears
from harness.worker.faults.hooks import (
    after_backward,
    after_build,
    around_evaluation,
    around_loss,
    around_update,
    before_microbatch,
    case_of_run,
    first_weight,
    in_parameter_groups,
    last_weight_like_the_first,
    layout_of_run,
    local,
    norm_weights,
    on_last_rank,
    on_odd_rank,
    two_alike,
    widening_weight,
    wrap,
)
from harness.worker.probes.places import local_shard
from harness.worker.probes.probe import optimizers_of
from harness.worker.targets.target import Target


def gradients_doubled() -> None:
    after_backward(lambda model, step: _scale_gradients(model, 2))


def _scale_gradients(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        if param.grad is not None:
            local(param.grad).mul_(factor)


def one_gradient_lost() -> None:
    _one_gradient(lambda grad, step: grad.zero_())


def nan_gradient_on_one_rank() -> None:
    def change(grad: torch.Tensor, step: int) -> None:
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            grad.view(-1)[0] = torch.nan

    _one_gradient(change)


def _one_gradient(change: Callable[[torch.Tensor, int], object]) -> None:
    def backward(model: nn.Module, step: int) -> None:
        grad = first_weight(model).grad
        if grad is not None:
            change(local(grad), step)

    after_backward(backward)


def gradients_accumulate() -> None:
    for owner in (Optimizer, nn.Module):
        wrap(owner, "zero_grad", lambda stock, *_, **__: None)


def microbatches_summed() -> None:
    case = case_of_run()
    after_backward(lambda model, step: _scale_gradients(model, case().train.accumulation))


def gradients_zeroed_between_microbatches() -> None:
    def change(model: nn.Module, number: int) -> None:
        if number > 1:
            model.zero_grad()

    before_microbatch(change)


def last_microbatch_not_reduced() -> None:
    case = case_of_run()

    def change(model: nn.Module, number: int) -> None:
        if number in (1, case().train.accumulation):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(number == 1, recurse=False)

    before_microbatch(change)


def update_missing_on_one_rank() -> None:
    around_update(lambda stock, model, step: on_odd_rank() or stock())


def update_missing_for_one_group() -> None:
    models: list[nn.Module] = []
    after_build(lambda target: models.append(target.model))

    def before_update(optimizer: Optimizer, *_: Any) -> None:
        lost = first_weight(models[-1])
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param is not lost]

    register_optimizer_step_pre_hook(before_update)


def weight_decay_lost() -> None:
    in_parameter_groups(lambda group: group.update(weight_decay=0.0))


def norm_counts_replicas() -> None:
    wrap(train, "squared_norm_share", lambda stock, model: stock(model) * dist.get_world_size())


def loss_over_local_tokens() -> None:
    layout = layout_of_run()
    around_loss(lambda stock, *args, **options: stock(*args, **options) * layout().dp)


def _batch(change: Callable[[slice, Case], slice]) -> None:
    wrap(data, "batch_slice", lambda stock, case, dp_rank: change(stock(case, dp_rank), case))


def same_batch_on_every_dp_rank() -> None:
    _batch(lambda mine, case: slice(0, case.local_batch))


def batches_rotated() -> None:
    def change(mine: slice, case: Case) -> slice:
        first = (mine.start + case.local_batch) % case.train.global_batch
        return slice(first, first + case.local_batch)

    _batch(change)


def _tokens_on_odd_rank(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if on_odd_rank():
        wrap(train, "tokens_of_rank", lambda stock, *args: change(stock(*args)).contiguous())


def one_rank_repeats_its_batch() -> None:
    _tokens_on_odd_rank(lambda tokens: tokens[:1].expand_as(tokens))


def one_tp_rank_reads_other_tokens() -> None:
    _tokens_on_odd_rank(lambda tokens: tokens.roll(1, 2))


def one_rank_has_another_seed() -> None:
    def change(stock: Any, case: Case) -> Any:
        return stock(replace(case, train=replace(case.train, seed=case.train.seed + 1)))

    if on_odd_rank():
        wrap(data, "global_tokens", change)


def one_rank_starts_from_other_weights() -> None:
    @torch.no_grad()
    def change(target: Target) -> None:
        local_shard(first_weight(target.model)).mul_(1.01)

    if on_odd_rank():
        after_build(change)


def weight_frozen() -> None:
    """Wrapping changes `requires_grad`: here it freezes one weight, which a full run can detect."""
    after_build(lambda target: first_weight(target.model).requires_grad_(False))


def one_row_of_a_gradient_scaled() -> None:
    def change(model: nn.Module, step: int) -> None:
        local(_gradient(widening_weight(model)))[:1].mul_(1.05)

    after_backward(change)


def last_row_lost_on_last_rank() -> None:
    def change(model: nn.Module, step: int) -> None:
        grad = local(_gradient(widening_weight(model)))
        assert grad.numel(), "the last rank holds no row"
        if on_last_rank():
            grad[-1:].zero_()

    after_backward(change)


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None, "the weight has no gradient"
    return weight.grad


def gradients_of_two_weights_swapped() -> None:
    """Two weights of one shape get each other's gradient, which no norm over all parameters shows."""

    def change(model: nn.Module, step: int) -> None:
        one, other = (local(_gradient(weight)) for weight in two_alike(model))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

    after_backward(change)


def query_scale_folded_into_weights() -> None:
    @torch.no_grad()
    def change(target: Target) -> None:
        found = linears(target.model)
        for name, factor in (("wq", 2.0), ("wk", 0.5)):
            last = [linear for fqn, linear in found.items() if fqn.endswith(f".attention.{name}")][-1]
            local_shard(last.weight).mul_(factor)

    after_build(change)


def last_token_dropped_on_last_rank() -> None:
    def change(stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        if on_last_rank():
            labels = labels.clone()
            labels.view(-1)[-1] = options.get("ignore_index", -100)
        return stock(logits, labels, **options)

    around_loss(change)


def one_update_skipped() -> None:
    """The second update of the optimizer is skipped, as after a gradient that was taken for infinite."""
    around_update(lambda stock, model, step: step == 2 or stock())


def last_rank_skips_one_update() -> None:
    around_update(lambda stock, model, step: (on_last_rank() and step == 2) or stock())


def update_clipped_in_one_step() -> None:
    """Gradients are halved before the second update, after their norm was reported. AdamW hides most of it."""

    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        if step == 2:
            _scale_gradients(model, 0.5)
        stock()

    around_update(change)


def weight_rounded_by_evaluation() -> None:
    @torch.no_grad()
    def evaluate(stock: Callable[[], Any], model: nn.Module) -> Any:
        loss, weight = stock(), local_shard(first_weight(model))
        weight.copy_(weight.bfloat16())
        return loss

    around_evaluation(evaluate)


def evaluation_mode_left_on() -> None:
    def evaluate(stock: Callable[[], Any], model: nn.Module) -> Any:
        loss = stock()
        model.eval()
        return loss

    around_evaluation(evaluate)


def one_update_from_old_gradient() -> None:
    kept: dict[int, torch.Tensor] = {}

    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        grad = local(_gradient(last_weight_like_the_first(model)))
        kept.setdefault(step, grad.clone())
        grad.copy_(kept.get(step - 1, kept[step]))
        stock()

    around_update(change)


def norms_decayed_twice() -> None:
    """Weight decay is applied to norms a second time, with a rate of 1e-3 and a decay of 0.1."""

    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        stock()
        for param in norm_weights(model):
            local(param).mul_(1 - 1e-3 * 0.1)

    around_update(change)


def betas_swapped() -> None:
    def change(group: dict[str, Any]) -> None:
        if "betas" in group:
            group["betas"] = tuple(reversed(group["betas"]))

    in_parameter_groups(change)


def learning_rate_of_one_group_doubled() -> None:
    groups: list[dict[str, Any]] = []

    def change(group: dict[str, Any]) -> None:
        groups.append(group)
        if len(groups) == 1:
            group["lr"] *= 2

    in_parameter_groups(change)


def momentum_lost() -> None:
    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        stock()
        for optimizer in optimizers_of(model):
            optimizer.state.clear()

    around_update(change)


def momentum_of_another_weight() -> None:
    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        one, other = two_alike(model)
        for optimizer in optimizers_of(model) if step == 2 else ():
            state = optimizer.state
            state[one], state[other] = state[other], state[one]
        stock()

    around_update(change)


def weight_decay_decoupled() -> None:
    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        groups = [group for optimizer in optimizers_of(model) for group in optimizer.param_groups]
        decays = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, decays, strict=True):
            for param in group["params"]:
                local_shard(param).mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        stock()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay

    around_update(change)


def update_scaled_by_dp() -> None:
    layout = layout_of_run()

    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        _scale_gradients(model, layout().dp)
        stock()

    around_update(change)


def master_weights_in_bfloat16() -> None:
    def change(stock: Callable[[], object], model: nn.Module, step: int) -> None:
        stock()
        for param in model.parameters():
            values = local_shard(param)
            values.copy_(values.bfloat16())

    around_update(change)
