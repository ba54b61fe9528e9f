"""The tensors of a recorded run as one rank has them: put together from the shards of all its ranks."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from harness.matrix.case import Case
from harness.matrix.layout import dp_rank
from harness.trace.model import FLOAT8, ModuleShard, ModuleTensorKind, SumTerms
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.ranks import summed

EXPLAINED = 0.1  # of a distance at most is left where terms of a sum explain it: below 0.02 in bfloat16


class Key(NamedTuple):
    """One tensor of a run. `part`: the data-parallel rank it belongs to; None for parameters and their gradients."""

    step: int
    part: int | None
    fqn: str
    call: int
    kind: ModuleTensorKind


class Values(NamedTuple):
    """One logical tensor. `parts` [ranks, ...] add up to it; None if it is no sum over TP ranks."""

    whole: torch.Tensor
    parts: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Values":
        return Values(change(self.whole), None if self.parts is None else change(self.parts))

    def stacked(self, ranks: int) -> torch.Tensor:
        """Return the parts; of what is no sum, all of it on the first rank."""
        if self.parts is not None and len(self.parts) == ranks:
            return self.parts
        parts = self.whole.new_zeros(ranks, *self.whole.shape)
        parts[0] = self.whole
        return parts


class Piece(NamedTuple):
    """The place in a logical tensor of what a rank had of it."""

    rank: int
    spans: tuple[tuple[int, int], ...]  # by dim: from, and up to

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(*span) for span in self.spans)


class Recorded(NamedTuple):
    """One logical tensor as the run had it: `pieces` in the order of ranks. `spread` is that of `ModuleDistance`."""

    values: Values
    pieces: tuple[Piece, ...]
    spread: float
    problem: str | None
    holders: Mapping[int, int]  # by rank: which of `pieces` it holds, by their rank
    unequal: Mapping[int, tuple[Piece, str]]  # by rank: the place and digest of what is not equal to the piece there


def assembled(case: Case, ranks: Sequence[Sequence[ModuleShard]], device: torch.device) -> dict[Key, Recorded | None]:
    """Return the logical tensors of a run, from the shards of all its ranks; None for what was float8 already."""
    shards: dict[Key, dict[int, ModuleShard]] = defaultdict(dict)
    for rank, recorded in enumerate(ranks):
        for shard in recorded:
            part = None if shard.kind in ("grad", "param") else dp_rank(case.layout, rank)
            shards[Key(shard.step, part, shard.fqn, shard.call, shard.kind)][rank] = shard
    return {key: _recorded(by_rank, device) for key, by_rank in shards.items()}


def _recorded(shards: Mapping[int, ModuleShard], device: torch.device) -> Recorded | None:
    first = next(iter(shards.values()))
    if first.dtype == FLOAT8:
        return None
    owned = {rank: shard for rank, shard in shards.items() if shard.data is not None}
    pieces = tuple(Piece(rank, _spans(shard)) for rank, shard in owned.items())
    local = [_local(shard) for shard in owned.values()]
    covered = sum(tensor.numel() for tensor in local)
    if first.summed and all(shard.local_shape == first.shape for shard in owned.values()):
        parts = torch.stack(local)
        values, wanted = Values(summed(parts), parts), parts.numel()
    else:
        values = Values(torch.zeros(first.shape, dtype=getattr(torch, first.dtype)))
        for piece, addend in zip(pieces, local, strict=True):
            values.whole[piece.place] += addend
        wanted = values.whole.numel() * (max(1, round(covered / max(1, values.whole.numel()))) if first.summed else 1)
    holders = _holders(shards)
    norm = values.whole.double().norm().item()
    squares = sum(tensor.double().square().sum().item() for tensor in local)
    return Recorded(
        values.map(lambda tensor: tensor.to(device)),
        pieces,
        math.sqrt(squares) / norm if first.summed and norm else 0.0,
        _problem(tuple(shards.values()), covered, wanted),
        holders,
        {rank: (Piece(rank, _spans(shard)), shard.digest) for rank, shard in shards.items() if rank not in holders},
    )


def _holders(shards: Mapping[int, ModuleShard]) -> Mapping[int, int]:
    owners = {(shard.offset, shard.digest): rank for rank, shard in shards.items() if shard.data is not None}
    return {
        rank: owners[shard.offset, shard.digest] if shard.data is None else rank
        for rank, shard in shards.items()
        if (shard.offset, shard.digest) in owners
    }


def _spans(shard: ModuleShard) -> tuple[tuple[int, int], ...]:
    return tuple((at, at + size) for at, size in zip(shard.offset, shard.local_shape, strict=True))


def _local(shard: ModuleShard) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shard.dtype)
    flat = torch.frombuffer(bytearray(shard.data), dtype=dtype) if shard.data else torch.empty(0, dtype=dtype)
    return flat.view(shard.local_shape)


def _problem(shards: Sequence[ModuleShard], covered: int, wanted: int) -> str | None:
    replicas: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for shard in shards:
        if not shard.summed:
            replicas[shard.offset].add(shard.digest)
    if any(len(digests) > 1 for digests in replicas.values()):
        return "ranks that hold the same tensor hold different values"
    return None if covered == wanted else f"the ranks hold {covered} of {wanted} elements"


def terms_of_sum(
    given: Recorded, computed: torch.Tensor, fqn: str, output: Recorded, stream: torch.Tensor | None
) -> SumTerms | None:
    """Return what ranks go on with instead of the sum of the outputs of module `fqn`, where this is why `given` is off.

    `given`: what a later module gets, to which the sum is added; `computed`: the same with the sum. `stream`: what it
    is added to, or None.
    """
    parts, weights = output.values.parts, dict[int, tuple[float, ...]]()
    if parts is None or parts[0].shape != computed.shape or given.values.whole.shape != computed.shape:
        return None
    ranks = tuple(piece.rank for piece in output.pieces)
    for piece in given.pieces:
        off = (given.values.whole[piece.place].double() - computed[piece.place].double()).flatten()
        terms = torch.stack([part[piece.place].double().flatten() for part in parts], 1)
        if not (off.isfinite().all() and terms.isfinite().all()):
            return None
        solution = torch.linalg.lstsq(terms, off[:, None]).solution[:, 0]
        if (terms @ solution - off).norm() > EXPLAINED * off.norm():
            return None
        weights[piece.rank] = tuple(round(1 + coefficient, 2) for coefficient in solution.tolist())
    for rank, (piece, digest) in given.unequal.items():
        values = (computed, *(part if stream is None else stream + part for part in parts))
        times = ((1.0,) * len(ranks), *(tuple(float(term_rank == of) for term_rank in ranks) for of in ranks))
        alike = (
            candidate
            for candidate, value in zip(times, values, strict=True)
            if ordered_digest(value[piece.place]) == digest
        )
        weights[rank] = next(alike, ())
    if not all(weights.values()) or all(weight == 1 for times in weights.values() for weight in times):
        return None  # what cannot be told from the bits of a replica, or a sum of other bits
    return SumTerms(fqn=fqn, ranks=ranks, weights=weights)
