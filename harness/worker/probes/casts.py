"""Casts and matmuls of a step: seen and copied in the middle of it, measured and recorded after it.

Training drives the code and the tables that measure out of the cache: measured at once, a cast would take two to three
times as long.
"""

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from harness.trace.operands import CastRecord, MatmulRecord
from harness.worker.probes.cast_numbers import (
    Cast,
    CastNumbers,
    HostCast,
    Scale,
    host_cast,
    measure,
    read_scale,
    summary,
)
from harness.worker.tensors.digests import Content, Contents, bytes_of
from harness.worker.tensors.ownership import mark_owned

_COPIED_BYTES = 1 << 22  # of sources, at a time: some dozen casts of a tiny model, still in the cache


class Measurement:
    """The numbers of a cast, measured when they are first read."""

    __slots__ = ("_cast", "_numbers", "content", "scale")

    def __init__(self, cast: HostCast) -> None:
        self._cast: HostCast | None = cast
        self._numbers: CastNumbers | None = None
        self.content: Content = cast.content
        self.scale: Scale = cast.scale

    @property
    def numbers(self) -> CastNumbers:
        """Measured now, if not before; the copy of the source is released."""
        if self._cast is not None:
            self._numbers, self._cast = measure(self._cast), None
        assert self._numbers is not None, "it is measured where its cast is released"
        return self._numbers


class CastMeter:
    """Measures casts. One that repeats another of the same memory is recognized and not measured again.

    A tensor is cast two or three times in a step: for the forward and for both gradients, for the three projections
    of attention. The same storage, alive in between and at the same version, with the same scale and the same bits as
    result, is the same cast.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._seen: dict[Hashable, tuple[StorageWeakRef, Measurement]] = {}
        self._copies: dict[Hashable, tuple[StorageWeakRef, torch.Tensor]] = {}
        self._copied: list[Measurement] = []
        self._copied_bytes = 0

    def see(self, cast: Cast) -> Measurement:
        scale, data = read_scale(cast.scale), bytes_of(cast.bits)
        source = cast.source
        storage = StorageWeakRef(source.untyped_storage())
        place = storage.cdata, source._version, source.storage_offset(), source.dtype
        key = place, cast.bits.dtype, cast.axiswise_dim, scale
        before = self._seen.get(key)
        if before is not None and before[1].content.data == data and not before[0].expired():
            self._contents.remember(cast.bits, before[1].content)
            return before[1]
        content = self._contents.add(cast.bits, data)
        measurement = Measurement(host_cast(cast, mark_owned(self._copy(source, place, storage)), scale, content))
        self._copied.append(measurement)
        self._seen[key] = storage, measurement
        return measurement

    def _copy(self, source: torch.Tensor, place: Hashable, storage: StorageWeakRef) -> torch.Tensor:
        """The source as it is now. Copied once, if it is cast along both dims."""
        key = place, None if source.is_contiguous() else source.stride()
        before = self._copies.get(key)
        if before is not None and before[1].numel() == source.numel() and not before[0].expired():
            return before[1].view(source.shape)
        self._copied_bytes += source.nbytes
        if self._copied_bytes > _COPIED_BYTES:
            self.settle()
        copy = mark_owned(source.clone() if source.is_cpu else source.cpu())
        self._copies[key] = storage, copy
        return copy

    def settle(self) -> None:
        for measurement in self._copied:
            _ = measurement.numbers
        self._copied.clear()
        self._copies.clear()
        self._copied_bytes = 0

    def forget(self) -> None:
        """Settle, and forget all casts, so that no later one counts as a repetition."""
        self.settle()
        self._seen.clear()


class PendingCast(NamedTuple):
    """What makes a `CastRecord`, without its tensors: its fields as far as they are known, and what completes them."""

    known: partial[CastRecord]
    placements: tuple[Placement, ...]
    measurement: Measurement

    def record(self) -> CastRecord:
        return self.known(
            placements=tuple(map(_placement_name, self.placements)),
            scale=summary(self.measurement.scale),
            data_digest=self.measurement.content.digest,
            **self.measurement.numbers._asdict(),
        )


class PendingMatmul(NamedTuple):
    """What makes a `MatmulRecord`, as `PendingCast`."""

    known: partial[MatmulRecord]
    a_scale: Scale
    b_scale: Scale
    a_content: Content
    b_content: Content

    def record(self) -> MatmulRecord:
        return self.known(
            a_scale=summary(self.a_scale),
            b_scale=summary(self.b_scale),
            a_digest=self.a_content.digest,
            b_digest=self.b_content.digest,
        )


def _placement_name(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return repr(placement) if hasattr(placement, "dim") else f"{type(placement).__name__}()"
