"""Class G: what a step reports of a training that is right, its loss and its gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.worker import train
from harness.worker.faults.hooks import around_loss, layout_of_run, local, wrap
from harness.worker.faults.parts import norm_weights
from harness.worker.reduction import of_all_ranks
from harness.worker.targets.target import StepResult


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
    """The reported loss is that of the first data-parallel rank instead of the mean over all of them."""
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
    """The reported loss is divided by the number of data-parallel ranks, although it is the global mean already."""
    layout = layout_of_run()
    _reported(lambda reported: reported / layout().dp)


def loss_reported_one_step_late() -> None:
    """The reported loss is that of the step before."""
    losses: list[torch.Tensor | float] = []

    def change(reported: torch.Tensor | float) -> torch.Tensor | float:
        losses.append(reported)
        return losses[-2:][0]

    _reported(change)


def norm_of_local_shards() -> None:
    """Every rank reports the norm of its own shards of the gradients."""
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
    """The reported norm leaves out the gradient of one norm."""

    def squared_norm_share(stock: Any, model: nn.Module) -> Any:
        left_out = norm_weights(model)[-2:][0]  # the last one of the blocks
        others = [param for param in model.parameters() if param is not left_out]
        return stock(SimpleNamespace(parameters=lambda: iter(others)))

    wrap(train, "squared_norm_share", squared_norm_share)


def norm_in_bfloat16() -> None:
    """The gradient norm is summed in bfloat16."""
    wrap(train, "squared_norm_share", lambda stock, model: stock(model).bfloat16().double())
