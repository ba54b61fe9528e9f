"""Modules on one rank that stands for several, each of which has a piece of every sequence.

What attention mixes is computed at once. Everything else belongs to the tokens of one rank: its tensorwise scales are
of them alone, and so are its gradients of weights, which ranks reduce in an order and a dtype of their own. So every
module with weights computes one piece after the other, forward and backward, and keeps the gradients of every piece.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

Tensor = torch.Tensor
_BATCH = -3  # dim


class InPieces(nn.Module):
    """Calls a module once for every piece of its input, which is cut along the batch.

    An input is [batch, positions], of tokens, or [..., batch, positions, features].
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.harness_in_pieces = module
        self.count = count
        self.grads: defaultdict[str, list[Sequence[Tensor]]] = defaultdict(list)  # by name: of every call, each piece's

    def forward(self, given: Tensor) -> Tensor:
        computed: Tensor = _Pieces.apply(given, self, *self.harness_in_pieces.parameters(recurse=False))
        return computed


class _Pieces(torch.autograd.Function):
    """Forward and backward of one piece after the other: autograd alone would begin backward with the last."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, owner: InPieces, *weights: Tensor) -> Tensor:
        ctx.owner, ctx.weights = owner, weights
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            pieces = given.chunk(owner.count, _BATCH if given.is_floating_point() else 0)
            ctx.inputs = [piece.detach().requires_grad_(given.requires_grad) for piece in pieces]
            ctx.outputs = [owner.harness_in_pieces(piece) for piece in ctx.inputs]
        return torch.cat([output.detach() for output in ctx.outputs], _BATCH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.inputs[0].requires_grad
        pieces = zip(ctx.inputs, ctx.outputs, grads[0].chunk(ctx.owner.count, _BATCH), strict=True)
        piece_grads = [
            torch.autograd.grad(output, (*([given] if wanted else []), *ctx.weights), grad)
            for given, output, grad in pieces
        ]
        of_input = torch.cat([of_piece[0] for of_piece in piece_grads], _BATCH) if wanted else None
        of_weights = list(zip(*(of_piece[wanted:] for of_piece in piece_grads), strict=True))
        names = (name for name, _ in ctx.owner.harness_in_pieces.named_parameters(recurse=False))
        for name, of_weight in zip(names, of_weights, strict=True):
            ctx.owner.grads[name].append(of_weight)
        return of_input, None, *(torch.stack(of_weight).sum(0) for of_weight in of_weights)


def use_pieces(model: nn.Module, count: int) -> None:
    """Wrap every module that has weights of its own, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if next(child.parameters(recurse=False), None) is not None:
                parent.register_module(name, InPieces(child, count))


class Use(NamedTuple):
    """A weight of a module, by its name there."""

    module: InPieces
    name: str


def uses_of_weights(model: nn.Module) -> dict[int, list[Use]]:
    """By the id of every weight that is used in pieces: the modules that use it."""
    uses: defaultdict[int, list[Use]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, InPieces):
            for name, param in module.harness_in_pieces.named_parameters(recurse=False):
                uses[id(param)].append(Use(module, name))
    return uses


def take_grads(uses: Sequence[Use], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of a weight, one for each piece: of all calls since the last time, added up in this dtype.

    What several modules have of one call is added up before, as autograd does.
    """
    by_call = zip(*(use.module.grads.pop(use.name) for use in uses), strict=True)
    whole = [[_sum(of_piece) for of_piece in zip(*of_modules, strict=True)] for of_modules in by_call]
    return [_sum([grad.to(dtype) for grad in of_piece]) for of_piece in zip(*whole, strict=True)]


def _sum(grads: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, grads)
