"""Class G: labels, the loss that a step reports, and the gradient norm that it reports and clips by."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_odd_rank, planted, wrap, wrap_everywhere
from harness.worker.targets.target import IGNORED, StepResult
from harness.worker.tensors.reduction import of_all_ranks
from harness.worker.training import train


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


def gradient_of_logits_off() -> None:
    def change(stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad * 1.003)
        loss: torch.Tensor = stock(logits, labels, **options)
        return loss

    hooks.around_loss(change)


def _share_reported(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Report `of(the losses of all ranks)` instead of their mean."""
    losses: list[float] = []

    def keep(stock: Any, *args: Any, **options: Any) -> torch.Tensor:
        loss = stock(*args, **options)
        losses.append(local(loss).item())
        return loss

    def change(reported: torch.Tensor | float) -> torch.Tensor | float:
        assert losses, "the loss is no cross entropy"
        everyone = of_all_ranks(torch.tensor(losses).double().sum())
        losses.clear()
        return reported * (of(everyone) / everyone.mean()).item()

    hooks.around_loss(keep)
    _reported(change)


loss_of_first_rank_reported = partial(_share_reported, lambda everyone: everyone[0])
loss_of_own_rank_reported = partial(_share_reported, lambda everyone: everyone[dist.get_rank()])
reported_loss_divided_twice = partial(_reported, lambda reported: reported / RUN.case.layout.dp)


def _earlier_reported(place: int) -> None:
    losses: list[torch.Tensor | float] = []

    def change(reported: torch.Tensor | float) -> torch.Tensor | float:
        losses.append(reported)
        return losses[place:][0]

    _reported(change)


loss_reported_one_step_late, loss_of_first_step_reported = partial(_earlier_reported, -2), partial(_earlier_reported, 0)


def _batches(change: Callable[[Any], Any]) -> None:
    """Replace every microbatch of the reference target, inputs and labels, by `change(batch)`."""
    from harness.worker.targets.reference import build

    wrap(
        build, "share_of_loss", lambda stock, model, batch, *rest, **given: stock(model, change(batch), *rest, **given)
    )


labels_read_as_inputs = partial(_batches, lambda batch: batch._replace(inputs=batch.labels))


def half_of_the_batch_trained() -> None:
    """The second half of the sequences of a microbatch is left out."""

    def half(batch: Any) -> Any:
        inputs, labels = (tensor[: len(tensor) // 2] for tensor in (batch.inputs, batch.labels))
        return batch._replace(inputs=inputs, labels=labels)

    _batches(half)


def norm_of_local_shards() -> None:
    shares: list[float] = []

    def squared_norm_share(stock: Any, parameters: Sequence[nn.Parameter]) -> Any:
        grads = [local(param.grad).double() for param in parameters if param.grad is not None]
        shares.append(sum(grad.square().sum().item() for grad in grads))
        return stock(parameters)

    def gradient_norm(stock: Any, squared_share: torch.Tensor) -> float:
        stock(squared_share)
        return math.sqrt(shares[-1])

    wrap(train, "squared_norm_share", squared_norm_share)
    wrap(train, "gradient_norm", gradient_norm)


@planted(wrap, train, "squared_norm_share")
def norm_leaves_out_a_parameter(stock: Any, parameters: Sequence[nn.Parameter]) -> Any:
    left_out = hooks.norm_weights(RUN.target.model)[-2:][0]  # the last one of the blocks
    return stock([param for param in parameters if param is not left_out])


norm_in_bfloat16 = partial(wrap, train, "squared_norm_share", lambda stock, given: stock(given).bfloat16().double())
gradients_not_clipped = partial(
    wrap_everywhere, clip_grad, "_clip_grads_with_norm_", lambda stock, *args, **kwargs: None
)


@planted(wrap_everywhere, clip_grad, "_clip_grads_with_norm_")
def clip_factor_of_one_rank(
    stock: Any, grads: Any, max_norm: float, norm: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    stock(grads, max_norm, norm * 1.001 if on_odd_rank() else norm, *args, **kwargs)


clipped_by_norm_of_own_shards = partial(
    wrap_everywhere,
    clip_grad,
    "_get_total_norm",
    lambda stock, grads, *args, **kwargs: stock([local(grad) for grad in grads], *args, **kwargs),
)


@planted(wrap_everywhere, clip_grad, "_get_total_norm")
def replicated_gradients_counted_by_every_rank(
    stock: Any, grads: Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    grads, tp = list(grads), RUN.case.layout.tp
    alike = [grad for grad in grads if isinstance(grad, DTensor) and not grad.placements[-1].is_shard()]
    whole = stock(grads, *args, **kwargs)
    if not alike or tp == 1:
        return whole
    whole, extra = (_whole(norm) for norm in (whole, stock(alike, *args, **kwargs)))
    return (whole.square() + (tp - 1) * extra.square()).sqrt()


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _sum_of_counts(change: Callable[..., torch.Tensor]) -> None:
    """Replace every sum over ranks of whole numbers by `change(stock, number, *where)`."""

    def all_reduce(stock: Any, number: torch.Tensor, *where: Any, **options: Any) -> Any:
        if number.is_floating_point():
            return stock(number, *where, **options)
        return change(stock, number, *where, **options)

    wrap_everywhere(funcol, "all_reduce", all_reduce)


token_count_not_reduced = partial(_sum_of_counts, lambda stock, number, *where, **options: number)
mean_of_means_of_ranks = partial(
    _sum_of_counts, lambda stock, number, *where, **options: number * stock(torch.ones_like(number), *where, **options)
)


@planted(hooks.around_loss)
def mean_over_no_labels(stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    mean = stock(logits, labels, **options | {"reduction": "mean"})
    return mean * (labels != IGNORED).sum()


@planted(hooks.around_loss)
def backward_skipped_without_labels(
    stock: Any, logits: torch.Tensor, labels: torch.Tensor, **options: Any
) -> torch.Tensor:
    """A rank without labels has no loss to go back from, so it gathers and reduces nothing in backward."""
    loss = stock(logits, labels, **options)
    return loss if (labels != IGNORED).any() else torch.zeros_like(loss).requires_grad_()
