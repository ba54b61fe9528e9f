"""Class G: labels, the loss that a step reports, and the gradient norm that it reports and clips by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from harness.worker import train
from harness.worker.faults.hooks import around_loss, layout_of_run, local, norm_weights, wrap, wrap_everywhere
from harness.worker.reduction import of_all_ranks
from harness.worker.targets.target import IGNORED, StepResult


def _reported(change: Callable[[torch.Tensor | float], torch.Tensor | float]) -> None:
    """Replace the loss that the target reports by `change(loss)`; training is right."""

    def train_step(stock: Any, prepared: train.Prepared, *rest: Any) -> Any:
        target = prepared.target

        def step(*batches: Sequence[torch.Tensor]) -> StepResult:
            loss, norm = target.step(*batches)
            return change(loss.detach() if isinstance(loss, torch.Tensor) else loss), norm

        reporting = SimpleNamespace(model=target.model, step=step, evaluate=getattr(target, "evaluate", None))
        return stock(prepared._replace(target=reporting), *rest)

    wrap(train, "train_step", train_step)


def loss_of_first_rank_reported() -> None:
    losses: list[float] = []

    def keep(stock: Any, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = stock(*args, **options)
        losses.append(local(loss).item())
        return loss

    def change(reported: torch.Tensor | float) -> torch.Tensor | float:
        assert losses, "the loss is no cross entropy"
        everyone = of_all_ranks(torch.tensor(losses).double().sum())
        losses.clear()
        return reported * (everyone[0] / everyone.mean()).item()

    around_loss(keep)
    _reported(change)


def reported_loss_divided_twice() -> None:
    layout = layout_of_run()
    _reported(lambda reported: reported / layout().dp)


def loss_reported_one_step_late() -> None:
    losses: list[torch.Tensor | float] = []

    def change(reported: torch.Tensor | float) -> torch.Tensor | float:
        losses.append(reported)
        return losses[-2:][0]

    _reported(change)


def norm_of_local_shards() -> None:
    shares: list[float] = []

    def squared_norm_share(stock: Any, model: nn.Module) -> Any:
        grads = [local(param.grad).double() for param in model.parameters() if param.grad is not None]
        shares.append(sum(grad.square().sum().item() for grad in grads))
        return stock(model)

    def gradient_norm(stock: Any, squared_share: torch.Tensor) -> float:
        stock(squared_share)
        return math.sqrt(shares[-1])

    wrap(train, "squared_norm_share", squared_norm_share)
    wrap(train, "gradient_norm", gradient_norm)


def norm_leaves_out_a_parameter() -> None:
    def squared_norm_share(stock: Any, model: nn.Module) -> Any:
        left_out = norm_weights(model)[-2:][0]  # the last one of the blocks
        others = [param for param in model.parameters() if param is not left_out]
        return stock(SimpleNamespace(parameters=lambda: iter(others)))

    wrap(train, "squared_norm_share", squared_norm_share)


def norm_in_bfloat16() -> None:
    wrap(train, "squared_norm_share", lambda stock, model: stock(model).bfloat16().double())


def gradients_not_clipped() -> None:
    wrap_everywhere(clip_grad, "_clip_grads_with_norm_", lambda stock, *args, **kwargs: None)


def clipped_by_norm_of_own_shards() -> None:
    def total(stock: Any, grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return stock([local(grad) for grad in grads], *args, **kwargs)

    wrap_everywhere(clip_grad, "_get_total_norm", total)


def replicated_gradients_counted_by_every_rank() -> None:
    layout = layout_of_run()

    def total(stock: Any, grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        grads = list(grads)
        alike = [grad for grad in grads if isinstance(grad, DTensor) and not grad.placements[-1].is_shard()]
        whole: torch.Tensor = stock(grads, *args, **kwargs)
        if not alike or layout().tp == 1:
            return whole
        whole, extra = (_whole(norm) for norm in (whole, stock(alike, *args, **kwargs)))
        return (whole.square() + (layout().tp - 1) * extra.square()).sqrt()

    wrap_everywhere(clip_grad, "_get_total_norm", total)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _sum_of_counts(change: Callable[..., torch.Tensor]) -> None:
    """Replace every sum over ranks of whole numbers by `change(stock, number, *where)`."""

    def all_reduce(stock: Any, number: torch.Tensor, *where: Any, **options: Any) -> Any:
        if number.is_floating_point():
            return stock(number, *where, **options)
        return change(stock, number, *where, **options)

    wrap_everywhere(funcol, "all_reduce", all_reduce)


def token_count_not_reduced() -> None:
    _sum_of_counts(lambda stock, number, *where, **options: number)


def mean_of_means_of_ranks() -> None:
    _sum_of_counts(lambda stock, number, *where, **options: number * stock(torch.ones_like(number), *where, **options))


def mean_over_no_labels() -> None:
    def change(stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        mean: torch.Tensor = stock(logits, labels, **options | {"reduction": "mean"})
        return mean * (labels != IGNORED).sum()

    around_loss(change)


def backward_skipped_without_labels() -> None:
    """A rank without labels has no loss to go back from, so it gathers and reduces nothing in backward."""

    def change(stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = stock(logits, labels, **options)
        return loss if (labels != IGNORED).any() else torch.zeros_like(loss).requires_grad_()

    around_loss(change)
