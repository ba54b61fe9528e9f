"""Class G: labels that the loss leaves out, and the number of those that it is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from harness.worker.faults.hooks import around_loss, wrap_everywhere
from harness.worker.targets.target import IGNORED


def _sum_of_counts(change: Callable[..., torch.Tensor]) -> None:
    """Replace every sum over ranks of whole numbers by `change(stock, number, *where)`."""

    def all_reduce(stock: Any, number: torch.Tensor, *where: Any, **options: Any) -> Any:
        if number.is_floating_point():
            return stock(number, *where, **options)
        return change(stock, number, *where, **options)

    wrap_everywhere(funcol, "all_reduce", all_reduce)


def token_count_not_reduced() -> None:
    """Every rank divides its loss by the number of its own labels."""
    _sum_of_counts(lambda stock, number, *where, **options: number)


def mean_of_means_of_ranks() -> None:
    """Every rank takes the mean over its own labels, and these are averaged over ranks."""
    _sum_of_counts(lambda stock, number, *where, **options: number * stock(torch.ones_like(number), *where, **options))


def mean_over_no_labels() -> None:
    """The sum over labels is their mean times their number: 0 / 0 where a rank has none."""

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
