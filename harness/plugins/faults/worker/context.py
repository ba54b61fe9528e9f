"""Class M: context parallelism. Which positions a rank has, what it attends to, and what its loss is divided by."""

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.plugins.faults.worker.hooks import RUN, planted, wrap
from harness.worker.targets.reference import build, context_parallel, parallel
from harness.worker.targets.reference.context_parallel import OfRank
from harness.worker.targets.reference.model import apply_rope, attend
from harness.worker.targets.target import IGNORED

Tensor = torch.Tensor


# Positions


@planted(wrap, OfRank, "at_positions")
def positions_of_every_piece_from_zero(_: Any, context: OfRank, table: Tensor) -> Tensor:
    return table[: len(context.mine)]


@planted(wrap, OfRank, "at_positions")
def positions_of_contiguous_pieces(_: Any, context: OfRank, table: Tensor) -> Tensor:
    rows: Tensor = table.chunk(context.mesh.size())[context.mesh.get_local_rank()]
    return rows


# Attention


def _without_order(stock: Any, context: OfRank, given: Tensor) -> Tensor:
    order, context.order = context.order, torch.arange(len(context.order))
    gathered: Tensor = stock(context, given)
    context.order = order
    return gathered


keys_in_order_of_ranks = partial(wrap, OfRank, "gathered", _without_order)


@planted(wrap, OfRank, "gathered")
def values_of_the_next_piece(stock: Any, context: OfRank, given: Tensor) -> Tensor:
    keys, values = stock(context, given).unbind()
    return torch.stack((keys, values.roll(len(context.mine), 1)))


@planted(wrap, OfRank, "attend")
def attention_within_a_piece(
    _: Any, context: OfRank, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    tables = context.at_positions(cos), context.at_positions(sin)
    return attend(apply_rope(q, *tables), apply_rope(k, *tables), v)


@planted(wrap, context_parallel, "causal")
def mask_by_row(stock: Any, mine: Tensor, total: int) -> Tensor:
    mask: Tensor = stock(torch.arange(len(mine)), total)
    return mask


@planted(wrap, context_parallel, "causal")
def mask_lost(_: Any, mine: Tensor, total: int) -> Tensor:
    return torch.ones(len(mine), total, dtype=torch.bool)


def _with_gradient(change: Any) -> None:
    """Replace the gradient of gathered keys and values, before ranks add theirs up, by `change(gradient, context)`."""

    def gathered(stock: Any, context: OfRank, given: Tensor) -> Tensor:
        keys_and_values: Tensor = stock(context, given)
        if keys_and_values.requires_grad:
            keys_and_values.register_hook(lambda gradient: change(gradient, context))
        return keys_and_values

    wrap(OfRank, "gathered", gathered)


@planted(_with_gradient)
def gradients_of_other_keys_lost(gradient: Tensor, context: OfRank) -> Tensor:
    return torch.zeros_like(gradient).index_copy(2, context.mine, gradient[:, :, context.mine])


@planted(_with_gradient)
def gradients_of_keys_averaged(gradient: Tensor, context: OfRank) -> Tensor:
    return gradient / context.mesh.size()


# Tokens and loss


def _labels(change: Any) -> None:
    """Replace the labels of a rank by `change(context, inputs, labels)`, where labels are of whole sequences."""

    def cut(stock: Any, target: Any, batch: Any) -> Any:
        mine = stock(target, batch)
        return mine._replace(labels=change(target.context, mine.inputs, batch.labels))

    wrap(build.ReferenceTarget, "cut", cut)


@planted(_labels)
def labels_shifted_within_a_piece(_: OfRank, inputs: Tensor, __: Tensor) -> Tensor:
    shifted = inputs.roll(-1, 1)
    shifted[:, -1] = IGNORED
    return shifted


@planted(_labels)
def labels_of_contiguous_pieces(context: OfRank, _: Tensor, labels: Tensor) -> Tensor:
    mine: Tensor = labels.chunk(context.mesh.size(), 1)[context.mesh.get_local_rank()]
    return mine


def _first_piece(stock: Any, context: OfRank, pieces: Any, mesh: DeviceMesh, device: torch.device) -> None:
    stock(context, pieces, mesh, device)
    context.mine = torch.tensor(pieces[0], device=device)


same_piece_on_every_rank = partial(wrap, OfRank, "__init__", _first_piece)


@planted(wrap, build, "global_token_count")
def loss_divided_by_labels_of_a_piece(stock: Any, batches: Any, _: Any, case: Any) -> int:
    return int(stock(batches, None, case)) * RUN.case.layout.dp


@planted(wrap, build, "global_token_count")
def tokens_counted_by_every_rank(stock: Any, *args: Any) -> int:
    return int(stock(*args)) * RUN.case.layout.cp


@planted(wrap, build, "share_of_loss")
def loss_of_a_piece_times_ranks(stock: Any, model: Any, batch: Any, case: Any, tokens: Any, **options: Any) -> Tensor:
    loss: Tensor = stock(model, batch, case, tokens / RUN.case.layout.cp, **options)
    return loss


def _sharded_over_others(stock: Any, layout: Any, world: Any) -> Any:
    """FSDP2 over ranks with other sequences alone: those of a sequence hold the same shards."""
    shards = parallel.mesh_of(layout.sequence_mesh, world)["dp_sequence"]
    return stock(layout, world)._replace(dp=shards, of_experts=shards)


gradients_not_reduced_over_cp = partial(wrap, parallel, "with_context", _sharded_over_others)
