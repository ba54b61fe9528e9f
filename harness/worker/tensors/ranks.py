"""The one mechanism by which one rank plays several: each computes its pieces of an operation, in the order of ranks.

An operation says of every operand, and of its result, what each rank has of it: a `Cut`. What ranks share, each of them
in its place, is put together from their pieces. What each of them has whole, they add up in rank order and round once,
as the virtual device does. Which ranks one plays, the dimensions say (`Played` of `matrix/dims`).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # sums are rounded once, as by the virtual device


def summed(parts: Tensor | Iterable[Tensor]) -> Tensor:
    """Return the sum of `parts` [ranks, ...] in rank order, rounded once, as the virtual device has it."""
    first, *others = parts
    total = first.to(WIDE.get(first.dtype, first.dtype), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


class Cut(NamedTuple):
    """What every rank has of a tensor, and the tensor that is `joined` of what they have: of values and of gradients.

    `pieces` returns the tensor itself for ranks that have all of it.
    """

    pieces: Callable[[Tensor], Sequence[Tensor]]
    joined: Callable[[Sequence[Tensor]], Tensor]


def whole(ranks: int) -> Cut:
    """Every rank has all of it, and a gradient of its own."""
    return Cut(lambda tensor: [tensor] * ranks, summed)


def along(dim: int, sizes: Sequence[int]) -> Cut:
    """Ranks have these sizes of a dim, one behind the other."""
    return Cut(
        lambda tensor: [piece.contiguous() for piece in tensor.split(list(sizes), dim)],
        lambda parts: torch.cat(list(parts), dim),
    )


STACKED = Cut(torch.unbind, lambda parts: torch.stack(list(parts)))  # [ranks, ...]


class Given(NamedTuple):
    """An operand of an operation. `keep` gets what every rank has of its gradient."""

    tensor: Tensor | None
    cut: Cut
    keep: Callable[[Sequence[Tensor]], None] | None = None


def on_ranks(operation: Callable[..., Tensor], result: Cut, *given: Given) -> Tensor:
    """Return the joined results of all ranks, each of which computes the operation on its pieces of the operands."""
    computed: Tensor = _OnRanks.apply(operation, result, given, *(operand.tensor for operand in given))
    return computed


class _OnRanks(torch.autograd.Function):
    """Forward and backward of one rank after the other: autograd alone would begin backward with the last."""

    @staticmethod
    def forward(
        ctx: Any, operation: Callable[..., Tensor], result: Cut, given: Sequence[Given], *tensors: Tensor | None
    ) -> Tensor:
        trained = ctx.needs_input_grad[3:]
        ctx.result, ctx.given, ctx.trained = result, given, [at for at, wanted in enumerate(trained) if wanted]
        with torch.set_grad_enabled(bool(ctx.trained)):
            pieces = [
                None if tensor is None else _as_leaves(tensor, operand.cut, wanted)
                for tensor, operand, wanted in zip(tensors, given, trained, strict=True)
            ]
            ranks = len(next(of_ranks for of_ranks in pieces if of_ranks is not None))
            ctx.operands = [[None if of is None else of[rank] for of in pieces] for rank in range(ranks)]
            ctx.results = [operation(*operands) for operands in ctx.operands]
        return result.joined([of_rank.detach() for of_rank in ctx.results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        of_ranks = [
            torch.autograd.grad(of_rank, [operands[at] for at in ctx.trained], grad)
            for operands, of_rank, grad in zip(ctx.operands, ctx.results, ctx.result.pieces(grads[0]), strict=True)
        ]
        joined: list[Tensor | None] = [None] * len(ctx.given)
        for at, parts in zip(ctx.trained, zip(*of_ranks, strict=True), strict=True):
            _, cut, keep = ctx.given[at]
            if keep is not None:
                keep(parts)
            joined[at] = cut.joined(parts)
        return None, None, None, *joined


def _as_leaves(tensor: Tensor, cut: Cut, trained: bool) -> list[Tensor]:
    pieces = cut.pieces(tensor)
    return [piece if piece is tensor else piece.detach().requires_grad_(trained) for piece in pieces]


def spread(tensor: Tensor, ranks: int) -> Tensor:
    """Return the same for every rank: [ranks, ...]. Its gradient is the sum of theirs, each over readers first."""
    return on_ranks(lambda of_rank: of_rank, STACKED, Given(tensor, whole(ranks)))


def products(multiply: Callable[[slice], Tensor], sizes: Sequence[int]) -> Tensor:
    """Return what ranks multiply that have parts of these sizes of what a matmul contracts: [ranks, ...]."""
    ends = itertools.accumulate(sizes, initial=0)
    return STACKED.joined([multiply(slice(*part)) for part in itertools.pairwise(ends)])


class Sum:
    """The sum of what ranks have, one after another: over those of a group first, rounded, and then over groups.

    What is `value` may be asked for before all ranks are through.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._groups: dict[int, Tensor] = {}

    def add(self, part: Tensor, group: int) -> None:
        part = part.detach().to(self._dtype).to(WIDE.get(self._dtype, self._dtype))
        if group in self._groups:
            self._groups[group] += part
        else:
            self._groups[group] = part.clone()

    @property
    def value(self) -> Tensor:
        return summed(total.to(self._dtype) for total in self._groups.values())
