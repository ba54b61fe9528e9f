"""The cast meter: copies casts in the middle of a step and measures them together.

Training drives the code and the tables that measure out of the cache: measured at once, a cast would take two to three
times as long.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from harness.worker.probes.cast_numbers import Cast, CastNumbers, HostCast, host_cast, measure
from harness.worker.probes.contents import Content, Contents
from harness.worker.probes.digests import bytes_of
from harness.worker.probes.probe_tensors import mark_owned
from harness.worker.probes.scales import Scale, read_scale

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
        """The measurement of a cast that just happened."""
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
        """Measure what was only copied."""
        for measurement in self._copied:
            _ = measurement.numbers
        self._copied.clear()
        self._copies.clear()
        self._copied_bytes = 0

    def forget(self) -> None:
        """Settle, and forget all casts, so that no later one counts as a repetition."""
        self.settle()
        self._seen.clear()
