"""Where a rank sits in the mesh of a case, and which ranks share a tensor with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from harness.spec.case import Case, Layout
from harness.trace.operands import CastRecord

AXES = ("dp_replicate", "dp_shard", "tp")  # outermost first
DP_AXES = AXES[:2]


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """The position of `rank` on every axis."""
    rank, tp = divmod(rank, layout.tp)
    dp_replicate, dp_shard = divmod(rank, layout.dp_shard)
    return {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}


def neighbours(layout: Layout, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
    """All ranks that differ from `rank` on these axes only, itself included, ascending."""
    kept = [axis for axis in AXES if axis not in set(axes)]
    mine = coordinates(layout, rank)
    return tuple(
        other
        for other in range(layout.world_size)
        if all(coordinates(layout, other)[axis] == mine[axis] for axis in kept)
    )


def scale_axes(case: Case, cast: CastRecord) -> Collection[str]:
    """Mesh axes along which the ranks hold one scale: the tensor is replicated there, or spread along the scaled dim.

    A weight is the same on every data-parallel rank. Float8 weights that FSDP2 gathers are an exemption: torchao 0.18
    reduces their amax over the FSDP mesh alone, so that every TP rank scales its own part, unless the scale was
    precomputed (which happens after a step), when it is that of the whole weight.
    """
    axes = {
        axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if _is_one_scale(cast, placement)
    }
    if cast.role == "weight":
        axes |= set(DP_AXES)
    if cast.phase in ("all_gather", "gathered") and not (case.float8.precompute_scale and cast.step > 1):
        axes.discard("tp")
    return axes


def replica_axes(cast: CastRecord) -> Collection[str]:
    """Mesh axes along which the ranks hold the same piece of the tensor."""
    axes = {axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if placement == "Replicate()"}
    if cast.role == "weight" and cast.phase not in ("all_gather", "gathered"):
        axes |= set(DP_AXES)
    return axes


def scaled_dim(cast: CastRecord) -> int | None:
    """The dim that one scale spans, counted from 0; None when one scale spans the tensor."""
    return None if cast.axiswise_dim is None else cast.axiswise_dim % len(cast.shape)


def _is_one_scale(cast: CastRecord, placement: str) -> bool:
    dim = scaled_dim(cast)
    return dim is None or placement in ("Replicate()", f"Shard({dim})")
