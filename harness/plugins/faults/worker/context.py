"""Class M: context parallelism. Which positions a rank has, what it attends to, and what its loss is divided by."""

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, planted, wrap
from harness.worker.targets.reference import build, context_parallel
from harness.worker.targets.reference.context_parallel import OfRank
from harness.worker.targets.reference.model import apply_rope, attend
from harness.worker.targets.target import IGNORED

Tensor = torch.Tensor


# Positions


positions_of_every_piece_from_zero = partial(
    wrap, OfRank, "at_positions", lambda _, context, table: table[: len(context.mine)]
)
positions_of_contiguous_pieces = partial(
    wrap, OfRank, "at_positions", lambda _, context, table: _of_contiguous_pieces(context, table, 0)
)


def _of_contiguous_pieces(context: OfRank, whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(context.mesh.size(), dim)[context.mesh.get_local_rank()]


# Attention


@planted(wrap, OfRank, "gathered")
def keys_in_order_of_ranks(stock: Any, context: OfRank, given: Tensor) -> Tensor:
    order, context.order = context.order, torch.arange(len(context.order))
    gathered: Tensor = stock(context, given)
    context.order = order
    return gathered


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


mask_by_row = partial(
    wrap, context_parallel, "causal", lambda stock, mine, total: stock(torch.arange(len(mine)), total)
)
mask_lost = partial(
    wrap, context_parallel, "causal", lambda _, mine, total: torch.ones(len(mine), total, dtype=torch.bool)
)


@planted(wrap, context_parallel, "causal")
def mask_off_by_one_at_a_border(stock: Any, mine: Tensor, total: int) -> Tensor:
    """The last token of every run of positions that a rank has sees the one behind it, which another rank has."""
    return stock(torch.where(torch.isin(mine + 1, mine), mine, mine + 1), total)


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


gradients_of_keys_averaged = partial(_with_gradient, lambda gradient, context: gradient / context.mesh.size())


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


labels_of_contiguous_pieces = partial(_labels, lambda context, _, labels: _of_contiguous_pieces(context, labels, 1))


@planted(wrap, OfRank, "__init__")
def same_piece_on_every_rank(stock: Any, context: OfRank, pieces: Any, mesh: DeviceMesh, device: torch.device) -> None:
    stock(context, pieces, mesh, device)
    context.mine = torch.tensor(pieces[0], device=device)


loss_divided_by_labels_of_a_piece = partial(
    wrap, build, "global_token_count", lambda stock, batches, _, case: stock(batches, None, case) * RUN.case.layout.dp
)
tokens_counted_by_every_rank = partial(
    hooks.wrap_result, build, "global_token_count", lambda count: count * RUN.case.layout.cp
)


@planted(wrap, build, "share_of_loss")
def loss_of_a_piece_times_ranks(stock: Any, model: Any, batch: Any, case: Any, tokens: Any, **options: Any) -> Tensor:
    loss: Tensor = stock(model, batch, case, tokens / RUN.case.layout.cp, **options)
    return loss


@planted(wrap, build, "build_meshes")
def gradients_not_reduced_over_cp(stock: Any, layout: Any, world: Any) -> Any:
    """FSDP2 over ranks with other sequences alone: those of a sequence hold the same shards."""
    meshes = stock(layout, world)
    shards = meshes.cp._get_root_mesh()["dp_sequence"]
    return meshes._replace(dp=shards, of_experts=shards)
