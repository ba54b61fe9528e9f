"""The loss of the reference target: cross entropy over the tokens of the global batch, with a padded vocabulary."""

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss_parallel

from harness.matrix.case import Case
from harness.worker.targets.target import IGNORED
from harness.worker.tensors.reduction import of_all_ranks


class Batch(NamedTuple):
    """A microbatch: inputs and labels, [local_batch, seq_len] each. `documents`: the lengths of those in it."""

    inputs: torch.Tensor
    labels: torch.Tensor
    documents: Sequence[int] | None = None


def share_of_loss(model: nn.Module, batch: Batch, case: Case, tokens: float, *, backward: bool = False) -> torch.Tensor:
    """Return one batch's share of the loss, the mean over `tokens`, detached. `backward`: accumulate its gradients."""
    with sharded_logits(case):
        packed = {} if batch.documents is None else {"documents": batch.documents}
        logits = mask_padded_vocab(model(batch.inputs, **packed), case)
        loss = summed_loss(logits, batch.labels) / tokens
        if backward:
            loss.backward()
    return whole(loss.detach())


def lengths_of(positions: torch.Tensor) -> list[int]:
    """Return the lengths of the documents of a microbatch, of one sequence behind the other."""
    begins = (positions.flatten() == 0).nonzero().flatten()
    return begins.diff(append=begins.new_tensor([positions.numel()])).tolist()


def sharded_logits(case: Case) -> AbstractContextManager[None]:
    """In it the loss of logits that TP ranks share is computed, and its gradients."""
    sharded: AbstractContextManager[None] = loss_parallel()
    return sharded if case.layout.shares_of_logits > 1 else contextlib.nullcontext()


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, case: Case, tokens: int) -> torch.Tensor:
    """Return the share of the loss of what the last stage of a pipeline computes."""
    return summed_loss(mask_padded_vocab(logits, case), labels) / tokens


def whole(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def global_token_count(batches: Iterable[Batch], dp: DeviceMesh | None, case: Case) -> int:
    """Return the number of tokens in the mean loss of one step, on all data-parallel ranks of the mesh `dp`.

    Ranks add up the labels that they have where a case ignores some.
    """
    if not case.train.counts_labels:
        return case.train.tokens
    return int(summed_over(torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum(), dp))


def summed_over(counts: torch.Tensor, *meshes: DeviceMesh | None) -> torch.Tensor:
    """Return the sum of the counts of all ranks of these meshes."""
    for mesh in meshes:
        for axis in range(0 if mesh is None else mesh.ndim):
            if mesh is not None and mesh.size(axis) > 1:
                counts = funcol.all_reduce(counts, "sum", (mesh, axis))
    return counts


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the labels of this rank, at least in float32, as torchtitan computes it.

    Labels that are IGNORED add nothing, and have gradients of zero.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORED)


def mask_padded_vocab(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the logits [..., padded vocab] with those of the padding set to -inf, so that its probability is zero."""
    vocab_size = case.model.vocab_size
    if vocab_size == case.model.padded_vocab_size:
        return logits
    if not isinstance(logits, DTensor):
        return logits.index_fill(-1, torch.arange(vocab_size, logits.size(-1), device=logits.device), -torch.inf)
    mesh, placements = logits.device_mesh, logits.placements
    _, offsets = compute_local_shape_and_global_offset(logits.shape, mesh, placements)
    local = logits.to_local()
    first = min(max(vocab_size - offsets[-1], 0), local.size(-1))
    padding = torch.arange(first, local.size(-1), device=local.device)
    masked = local.index_fill(-1, padding, -torch.inf)
    return DTensor.from_local(masked, mesh, placements, shape=logits.shape, stride=logits.stride())


def global_loss(loss: torch.Tensor, *, tp: int) -> torch.Tensor:
    """Return the sum of the losses of all data-parallel ranks in rank order, float64. A report, not a part of training.

    Every TP rank adds up the losses of its own position on the TP axis, so that TP ranks that disagree show.
    """
    return of_all_ranks(loss.double())[dist.get_rank() % tp :: tp].sum()
