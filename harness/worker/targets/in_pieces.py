"""Modules on one rank that plays several, each of which has a piece of every sequence.

What attention mixes is computed at once. Everything else belongs to the tokens of one rank: its tensorwise scales are
of them alone, and so are its gradients of weights, which ranks reduce in an order and a dtype of their own. So every
module with weights computes one piece after the other, and keeps the gradients of every piece.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from harness.worker.tensors.ranks import Given, along, on_ranks, whole

Tensor = torch.Tensor
_BATCH = -3  # the dim of activations [..., batch, positions, features]


class InPieces(nn.Module):
    """Calls a module once for every piece of its input: of tokens along their first dim, of activations along `dim`.

    Tokens are [batch, positions], and activations [..., batch, positions, features]. Of a model without a batch they
    are [positions] and [..., positions, features], whose `dim` is -2.
    """

    def __init__(self, module: nn.Module, count: int, dim: int = _BATCH) -> None:
        super().__init__()
        self.harness_in_pieces = module
        self.count = count
        self.dim = dim
        self.grads: defaultdict[str, list[Sequence[Tensor]]] = defaultdict(list)  # by name: of every call, each piece's

    def forward(self, given: Tensor) -> Tensor:
        dim = self.dim if given.is_floating_point() else 0
        sizes = [given.shape[dim] // self.count] * self.count
        weights = [
            Given(param, whole(self.count), functools.partial(self._keep, name))
            for name, param in self.harness_in_pieces.named_parameters(recurse=False)
        ]
        pieces = Given(given, along(dim, sizes))
        return on_ranks(lambda piece, *_: self.harness_in_pieces(piece), along(self.dim, sizes), pieces, *weights)

    def _keep(self, name: str, of_pieces: Sequence[Tensor]) -> None:
        self.grads[name].append(of_pieces)


def use_pieces(model: nn.Module, count: int, dim: int = _BATCH) -> None:
    """Wrap every module that has weights of its own, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if next(child.parameters(recurse=False), None) is not None:
                parent.register_module(name, InPieces(child, count, dim))


def add_up_in_norms(model: nn.Module) -> None:
    """Let every norm of a rank that has one piece add up the gradients of its input as a piece by itself does.

    A norm uses its input twice, and the residual stream a third time. Where a piece is computed by itself both
    gradients of a norm are added up before the third.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(lambda _, args: (args[0].view_as(args[0]),))


Use = Callable[[], list[Sequence[Tensor]]]  # takes what a module keeps of the gradients of a weight


def uses_of_weights(model: nn.Module) -> dict[int, list[Use]]:
    """By the id of every weight that is used in pieces: the modules that use it."""
    uses: defaultdict[int, list[Use]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, InPieces):
            for name, param in module.harness_in_pieces.named_parameters(recurse=False):
                uses[id(param)].append(functools.partial(module.grads.pop, name))
    return uses


def take_grads(uses: Sequence[Use], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of a weight, one for each piece: of all calls since the last time, added up in this dtype.

    What several modules have of one call is added up before, as autograd does.
    """
    by_call = zip(*(take() for take in uses), strict=True)
    of_calls = [[_sum(of_piece) for of_piece in zip(*of_modules, strict=True)] for of_modules in by_call]
    return [_sum([grad.to(dtype) for grad in of_piece]) for of_piece in zip(*of_calls, strict=True)]


def _sum(grads: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, grads)
