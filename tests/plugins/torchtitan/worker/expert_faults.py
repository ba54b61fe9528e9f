"""Faults at the seams of torchtitan's mixtures of experts, each a function that a rank calls before it builds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _wrap(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by `change(stock, *args)`."""
    stock = getattr(owner, name)

    @functools.wraps(stock)  # torchtitan asks for the names of arguments
    def changed(*args: Any, **options: Any) -> Any:
        return change(stock, *args, **options)

    setattr(owner, name, changed)


def _dispatcher() -> Any:
    from torchtitan.models.common import token_dispatcher

    return token_dispatcher.AllToAllTokenDispatcher


def _experts() -> Any:
    from torchtitan.models.common import moe

    return moe


def _rolled(rows: torch.Tensor) -> torch.Tensor:
    return rows.roll(1, 0) if dist.get_rank() % 2 else rows


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _rolled(grads[0])


def rows_left_by_rank() -> None:
    """Experts compute what arrived in the order of ranks, as if it were by expert."""

    def change(stock: Any, dispatcher: Any, rows: torch.Tensor, counts: torch.Tensor) -> Any:
        shape, _, _, local = stock(dispatcher, rows, counts)
        return shape, rows, torch.arange(len(rows)), local

    _wrap(_dispatcher(), "_permute", change)


def results_left_by_expert() -> None:
    _wrap(_dispatcher(), "_unpermute", lambda stock, dispatcher, rows, shape, indices: rows.view(shape))


def token_lost_on_its_way() -> None:
    def change(stock: Any, dispatcher: Any, rows: torch.Tensor, *rest: Any) -> Any:
        lost = torch.cat([rows[:-1], torch.zeros_like(rows[-1:])]) if dist.get_rank() % 2 else rows
        return stock(dispatcher, lost, *rest)

    _wrap(_dispatcher(), "_dispatch_token_exchange", change)


def gradients_of_tokens_moved() -> None:
    _wrap(_dispatcher(), "_dispatch_token_exchange", lambda stock, *args: _OtherGradient.apply(stock(*args)))


def gradients_of_results_moved() -> None:
    def change(stock: Any, dispatcher: Any, rows: torch.Tensor, *rest: Any) -> Any:
        return stock(dispatcher, _OtherGradient.apply(rows), *rest)

    _wrap(_dispatcher(), "_combine_token_exchange", change)


def counts_of_another_expert() -> None:
    def change(stock: Any, *args: Any) -> Any:
        *others, counts = stock(*args)
        return *others, counts.flip(0)

    _wrap(_dispatcher(), "_permute", change)


def choice_of_another_token() -> None:
    """As where ranks slice scores and tokens of a sequence differently."""

    def change(stock: Any, *args: Any) -> Any:
        scores, chosen, everything = stock(*args)
        return scores, _rolled(chosen), everything

    _wrap(_experts().TokenChoiceTopKRouter, "forward", change)


def choice_not_normalized() -> None:
    def change(stock: Any, router: Any, *args: Any) -> Any:
        router.route_norm = False
        return stock(router, *args)

    _wrap(_experts().TokenChoiceTopKRouter, "forward", change)


def experts_of_one_rank_permuted() -> None:
    def change(stock: Any, experts: Any, **operands: Any) -> Any:
        flipped = operands["B_t"].flip(0) if dist.get_rank() % 2 else operands["B_t"]
        return stock(experts, **operands | {"B_t": flipped})

    _wrap(_experts().GroupedExperts, "_grouped_mm", change)


def float8_experts_of_one_rank_permuted() -> None:
    from torchao.prototype.moe_training import utils

    def change(stock: Any, rows: torch.Tensor, weights: torch.Tensor, **options: Any) -> Any:
        flipped = weights.transpose(-2, -1).flip(0).transpose(-2, -1)
        return stock(rows, flipped if dist.get_rank() % 2 else weights, **options)

    _wrap(utils, "_quantize_then_scaled_grouped_mm", change)


def shared_expert_lost() -> None:
    def change(stock: Any, mixture: Any, *args: Any, **options: Any) -> Any:
        shared, mixture.shared_experts = mixture.shared_experts, None
        out = stock(mixture, *args, **options)
        mixture.shared_experts = shared
        return out

    _wrap(_experts().MoE, "forward", change)


def expert_gradients_times_ep() -> None:
    """FSDP2 divides the gradients of experts by fewer ranks than the others'."""
    from torchtitan.distributed import utils

    def change(stock: Any, params: Any, *args: Any, **options: Any) -> Any:
        params = list(params)
        for param in params:
            if param.dim() == 3 and param.grad is not None:
                param.grad.mul_(2)
        return stock(params, *args, **options)

    _wrap(utils, "clip_grad_norm_", change)


def bias_moves_to_the_busy() -> None:
    from torchtitan.components.optimizer import optimizer

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def sign(of: torch.Tensor) -> torch.Tensor:
            return -torch.sign(of)

    optimizer.torch = _Torch()


def experts_left_in_bfloat16() -> None:
    from torchtitan.components.quantization import Float8GroupedExpertsConverter

    _wrap(Float8GroupedExpertsConverter, "convert", lambda stock, converter, model: model)


def padding_of_another_row() -> None:
    """Rows that pad a group of tokens are one of them."""

    def change(stock: Any, dispatcher: Any, rows: torch.Tensor, counts: torch.Tensor) -> Any:
        shape, padded, indices, sizes = stock(dispatcher, rows, counts)
        pads = (indices < 0) & (torch.arange(len(indices)) < sizes.sum())
        return shape, torch.where(pads[:, None], rows[:1], padded), indices, sizes

    from torchtitan.models.common import token_dispatcher

    _wrap(token_dispatcher.TorchAOTokenDispatcher, "_permute", change)
