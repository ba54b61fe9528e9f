"""Which ranks must share the scale of a cast, and which hold the same shard of its tensor."""

from __future__ import annotations

from collections.abc import Collection

from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES
from harness.trace.operands import CastRecord


def scale_axes(case: Case, cast: CastRecord) -> Collection[str]:
    """Mesh axes along which ranks share one scale: the tensor is replicated there, or sharded along the scaled dim.

    A weight is the same on every data-parallel rank, and one tensor for everything that multiplies it.
    """
    axes = {
        axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if _is_one_scale(cast, placement)
    }
    if cast.role == "weight":
        axes |= set(DP_AXES)
    return axes


def replica_axes(cast: CastRecord) -> Collection[str]:
    """Mesh axes along which the ranks hold the same shard of the tensor."""
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
