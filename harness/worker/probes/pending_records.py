"""Casts and matmuls seen in the middle of a step, without their tensors; `record()` completes them after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement, Shard

from harness.trace.operands import CastPhase, CastRecord, GemmRole, MatmulRecord, Role
from harness.worker.probes.cast_meter import Measurement
from harness.worker.probes.contents import Content
from harness.worker.probes.scales import Scale, dtype_name, summary

# Placements and the names of the mesh axes they speak of; both empty for a plain tensor.
Distribution = tuple[tuple[Placement, ...], tuple[str, ...]]


class PendingCast(NamedTuple):
    """What makes a `CastRecord`."""

    order: int  # of execution, casts and matmuls together
    step: int
    fqn: str
    role: Role
    phase: CastPhase
    shape: torch.Size
    local_shape: torch.Size
    distribution: Distribution
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    axiswise_dim: int | None
    measurement: Measurement

    def record(self) -> CastRecord:
        """The record, complete."""
        placements, mesh_axes = self.distribution
        return CastRecord(
            index=self.order,
            step=self.step,
            fqn=self.fqn,
            role=self.role,
            phase=self.phase,
            shape=tuple(self.shape),
            local_shape=tuple(self.local_shape),
            placements=tuple(map(_placement_name, placements)),
            mesh_axes=tuple(mesh_axes),
            source_dtype=dtype_name(self.source_dtype),
            target_dtype=dtype_name(self.target_dtype),
            axiswise_dim=self.axiswise_dim,
            scale=summary(self.measurement.scale),
            data_digest=self.measurement.content.digest,
            **self.measurement.numbers._asdict(),
        )


class PendingMatmul(NamedTuple):
    """What makes a `MatmulRecord`."""

    order: int  # of execution, casts and matmuls together
    step: int
    fqn: str
    gemm: GemmRole
    a_shape: torch.Size
    b_shape: torch.Size
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    a_scale: Scale
    b_scale: Scale
    a_content: Content
    b_content: Content

    def record(self) -> MatmulRecord:
        """The record, complete."""
        return MatmulRecord(
            index=self.order,
            step=self.step,
            fqn=self.fqn,
            gemm=self.gemm,
            m=self.a_shape[0],
            k=self.a_shape[1],
            n=self.b_shape[1],
            a_dtype=dtype_name(self.a_dtype),
            b_dtype=dtype_name(self.b_dtype),
            a_scale=summary(self.a_scale),
            b_scale=summary(self.b_scale),
            a_digest=self.a_content.digest,
            b_digest=self.b_content.digest,
        )


def _placement_name(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return repr(placement) if hasattr(placement, "dim") else f"{type(placement).__name__}()"
