"""Faults of context parallelism at torchtitan's own seams: each function plants one, where ranks have two pieces."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.plugins.torchtitan.worker import preload

preload()

from torch.distributed.fsdp import DataParallelMeshDims  # noqa: E402
from torchtitan import trainer  # noqa: E402  it is imported with shims
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

Tensor = torch.Tensor
Cut = tuple[Tensor, Tensor, dict[str, Any]]  # inputs, labels, and options of the model
_RANKS = 2


def _of_rows(change: Callable[[Cut, Cut, DeviceMesh], Cut]) -> None:
    """Replace what a rank has of a row by `change(of_rank, row, mesh)`."""
    stock = trainer.prepare_context_parallel_input

    def prepared(inputs: Tensor, labels: Tensor, options: dict[str, Any], mesh: DeviceMesh, *rest: Any) -> Cut:
        row = inputs, labels, dict(options)
        return change(stock(inputs, labels, options, mesh, *rest), row, mesh)

    trainer.prepare_context_parallel_input = prepared


def _with_mask(change: Callable[[Tensor, Cut, Tensor], Tensor]) -> None:
    """Replace the mask of a rank by `change(of_rank, what the rank has, of the row)`."""

    def masked(of_rank: Cut, row: Cut, _: DeviceMesh) -> Cut:
        mask = of_rank[2]["attention_masks"]
        mask.dense = change(mask.dense, of_rank, row[2]["attention_masks"].dense)
        return of_rank

    _of_rows(masked)


def positions_not_cut() -> None:
    _of_rows(lambda cut, row, _: (*cut[:2], cut[2] | {"positions": row[2]["positions"][: len(cut[0])]}))


def labels_of_contiguous_pieces() -> None:
    _of_rows(lambda cut, row, mesh: (cut[0], row[1].chunk(mesh.size())[mesh.get_local_rank()], cut[2]))


def mask_not_cut() -> None:
    """Every rank has the mask of the first queries."""
    _with_mask(lambda _, of_rank, row: row[..., : len(of_rank[0]), :])


def mask_of_keys_in_their_order() -> None:
    """The mask is cut by queries alone, and keys are gathered in the order of ranks."""
    _with_mask(lambda _, of_rank, row: row[..., of_rank[2]["positions"], :])


def mask_lost() -> None:
    _with_mask(lambda mask, *_: torch.ones_like(mask))


def _with_gathered(change: Callable[[Tensor, slice], Tensor], *, gradient: bool) -> None:
    """Replace gathered keys and values, or the gradients of them, by `change(tensor, the piece of this rank)`."""
    stock = FlexAttention.forward

    @functools.wraps(stock)  # torchtitan reads the names of what it is called with
    def forward(self: Any, q: Tensor, *gathered: Tensor, **options: Any) -> Tensor:
        first = dist.get_rank() % _RANKS * len(q)
        mine = slice(first, first + len(q))
        changed = gathered if gradient else [change(tensor, mine) for tensor in gathered]
        for tensor in gathered if gradient else ():
            tensor.register_hook(lambda grad: change(grad, mine))
        attended: Tensor = stock(self, q, *changed, **options)
        return attended

    FlexAttention.forward = forward


def gradients_of_other_keys_lost() -> None:
    def lost(grad: Tensor, mine: slice) -> Tensor:
        kept = torch.zeros_like(grad)
        kept[mine] = grad[mine]
        return kept

    _with_gathered(lost, gradient=True)


def gradients_of_keys_averaged() -> None:
    _with_gathered(lambda grad, _: grad / _RANKS, gradient=True)


def keys_and_values_of_the_next_piece() -> None:
    _with_gathered(lambda gathered, mine: gathered.roll(mine.stop - mine.start, 0), gradient=False)


def tokens_counted_by_every_rank() -> None:
    stock = trainer.Trainer._forward_backward_body
    trainer.Trainer._forward_backward_body = lambda self, inputs, labels, tokens, options: stock(
        self, inputs, labels, tokens * _RANKS, options
    )


def gradients_not_reduced_over_cp() -> None:
    """FSDP2 shards over ranks with other rows alone, and parameters count as equal on those of a row."""
    parallelizing: Any = importlib.import_module("torchtitan.models.llama3.parallelize")
    sharding: Any = importlib.import_module("torchtitan.models.common.decoder_sharding")
    resolve, place = parallelizing.resolve_fsdp_mesh, sharding.dense_param_placement

    def placed(**tp: Any) -> Any:
        layout = place(**tp)
        layout.axis_types[sharding.CP] = sharding.spmd.I
        return layout

    parallelizing.resolve_fsdp_mesh = lambda dims: (resolve(dims)[0], DataParallelMeshDims(shard="dp_shard"))
    sharding.dense_param_placement = placed
