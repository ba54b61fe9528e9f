"""Sketches initial weights, gradients after every backward, and parameters after every update.

See `harness/trace/model.py`.
"""

import functools

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.matrix.case import Case
from harness.trace.model import SKETCH_SIZE, SketchKind, TensorSketch
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.probe import Probe
from harness.worker.tensors.digests import bytes_of, fingerprint, ordered_digest
from harness.worker.tensors.names import clean_fqn, mark_owned
from harness.worker.tensors.places import Place, Places, local_shard, place_of, unwrapped
from harness.worker.tensors.reduction import reduced_gradient

_ROWS_SEED, _COLUMNS_SEED = 1, 2


class SketchProbe(Probe):
    """Records a `TensorSketch` of every gradient and of every updated parameter, of all steps.

    `pieces`: into how many a single rank cuts each of them along dim 0, which are the shards of as many FSDP2 ranks.
    Experts are cut into `groups` along dim 0, the ranks of `ep`, and each of these along their rows.
    """

    def __init__(self, case: Case, device: torch.device, pieces: int = 1, groups: int = 1) -> None:
        super().__init__(case, device)
        self._pieces = pieces
        self._groups = groups
        self._replicas = case.layout.dp_replicate if pieces == 1 and case.layout.tp == 1 else 1
        self._sketches: list[TensorSketch] = []
        self._places = Places(case.layout)  # parameters that are not on the TP mesh are the same on all its ranks

    @torch.no_grad()
    @unobserved()
    def attach(self, model: nn.Module) -> None:
        """Sketch the weights that a run starts from; not those that it is resumed with."""
        if self._step == 0:
            for fqn, param in model.named_parameters():
                self._add(fqn, "initial", param)

    @torch.no_grad()
    def after_backward(self, model: nn.Module) -> None:
        """Sketch every gradient; a parameter without one is left out, which parity reports."""
        for fqn, param in model.named_parameters():
            grad = reduced_gradient(param)
            if grad is not None:
                self._add(fqn, "grad", grad)

    @torch.no_grad()
    def after_update(self, model: nn.Module) -> None:
        for fqn, param in model.named_parameters():
            self._add(fqn, "param", param)

    def _add(self, fqn: str, kind: SketchKind, tensor: torch.Tensor) -> None:
        name, place, local = clean_fqn(fqn), self._places(tensor), local_shard(tensor)
        if isinstance(local, Float8TrainingTensor):
            return  # FSDP2 holds it gathered although the step is over: the parameter itself is not in the model
        dim = _cut_dim(tensor)
        groups = self._groups if dim else 1
        for group in local.chunk(groups):
            at = list(place.offset)
            for piece in group.chunk(self._pieces // groups, dim):
                piece_place = place._replace(offset=tuple(at))
                self._sketches.append(
                    _sketch(name, kind, max(1, self._step), piece, piece_place, replicas=self._replicas, cut=dim)
                )
                at[dim] += piece.shape[dim]
            place = place._replace(offset=(place.offset[0] + len(group), *place.offset[1:]))

    def result(self) -> tuple[TensorSketch, ...]:
        return tuple(self._sketches)


def _cut_dim(tensor: torch.Tensor) -> int:
    """Return the dim along which FSDP2 shards a tensor: 0, unless its target chose another."""
    tensor = unwrapped(tensor)
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, Shard)), 0)


def sketch(fqn: str, kind: SketchKind, step: int, tensor: torch.Tensor) -> TensorSketch:
    """Sketch what this rank holds of `tensor`, distributed or not."""
    return _sketch(fqn, kind, step, local_shard(tensor), place_of(tensor))


def _sketch(  # noqa: PLR0913  what a sketch says of itself
    fqn: str, kind: SketchKind, step: int, local: torch.Tensor, place: Place, *, replicas: int = 1, cut: int = 0
) -> TensorSketch:
    values = local.double()
    flat = values.reshape(-1)
    parts = _parts(local, replicas, cut)
    return TensorSketch(
        fqn=fqn,
        kind=kind,
        step=step,
        shape=place.shape,
        offset=place.offset,
        local_shape=tuple(local.shape),
        owner=place.owner,
        norm_squared=torch.dot(flat, flat).item(),
        sums=bytes_of(_signed_sums(values, place.offset)),
        digest=fingerprint("".join(parts).encode()) if parts else ordered_digest(local),
        parts=parts,
        cut=cut,
    )


def _parts(local: torch.Tensor, replicas: int, dim: int) -> tuple[str, ...]:
    if replicas == 1 or local.shape[dim] % replicas:
        return ()
    return tuple(ordered_digest(part) for part in local.chunk(replicas, dim))


def _signed_sums(values: torch.Tensor, offset: tuple[int, ...]) -> torch.Tensor:
    if values.numel() == 0:
        return torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    rows = _signs(_ROWS_SEED, offset[0], len(values)).to(values.device)
    sums = (rows @ values.flatten(1)).unflatten(1, values.shape[1:]) if values.dim() > 2 else rows @ values
    for dim in range(1, values.dim()):
        columns = _signs(_COLUMNS_SEED + dim - 1, offset[dim], values.size(dim)).to(values.device)
        sums = (sums * columns[(..., *[None] * (values.dim() - dim - 1))]).sum(1)
    return sums


@functools.lru_cache(maxsize=64)
def _signs(seed: int, begin: int, count: int) -> torch.Tensor:
    """+1 or -1 for positions `begin` to `begin + count` of one dim: [SKETCH_SIZE, count], float64."""
    generator = np.random.Philox(key=seed)
    words = generator.random_raw(begin + count)[begin:]
    bits = (words[None, :] >> np.arange(SKETCH_SIZE, dtype=np.uint64)[:, None]) & np.uint64(1)
    return mark_owned(torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64)))
