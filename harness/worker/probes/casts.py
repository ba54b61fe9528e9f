"""Casts and matmuls of a step: seen and copied in the middle of it, measured and recorded after it.

Training drives the code and the tables that measure out of the cache: measured at once, a cast would take two to three
times as long.

Of what a matmul reads, the step and microbatch are found in which its memory was first used. Memory is followed, not
numbers: a cast that is kept for too long shows although no value of its weight has changed yet. What was written to is
new. Versions of tensors tell that, and their bytes: below autograd, where subclasses compute, a view has a version of
its own.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from harness.trace.operands import Aged, Aging, CastPhase, CastRecord, MatmulRecord, Role
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
from harness.worker.tensors.names import clean_fqn, mark_owned
from harness.worker.tensors.places import local_part

_COPIED_BYTES = 1 << 22  # of sources, at a time: some dozen casts of a tiny model, still in the cache


class Measurement:
    """The numbers of a cast, measured when they are first read."""

    __slots__ = ("_cast", "_numbers", "content", "scale")

    def __init__(self, cast: HostCast, content: Content) -> None:
        self._cast: HostCast | None = cast
        self._numbers: CastNumbers | None = None
        self.content = content
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
        copy = mark_owned(self._copy(source, place, storage))
        measurement = Measurement(host_cast(cast, copy, scale, data), self._contents.add(cast.bits, data))
        self._copied.append(measurement)
        self._seen[key] = storage, measurement
        return measurement

    def _copy(self, source: torch.Tensor, place: Hashable, storage: StorageWeakRef) -> torch.Tensor:
        """Return the source as it is now. Copied once, if it is cast along both dims."""
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


UNKNOWN = "?"  # the FQN of a cast or matmul outside of every known module


class Pass(NamedTuple):
    """One of the calls of a module in a step. A backward belongs to the call that it is the gradient of."""

    step: int
    fqn: str
    phase: CastPhase  # that of the call
    number: int  # counts from 1 in every step and phase; 0 outside of every known module


class Use(NamedTuple):
    """A cast or a matmul that uses memory."""

    order: int  # its index in the trace
    by: Pass
    role: Role
    where: str  # phase of the cast, or which matmul it is


class _Version(NamedTuple):
    address: int
    version: int


class _First(NamedTuple):
    """The first use of memory."""

    storage: StorageWeakRef
    version: int
    content: Content | None  # None: the version tells whether it was written to
    by: Pass
    role: Role
    source: _Version | None  # what was cast, of its scale


class _Again(NamedTuple):
    what: Aging
    use: Use
    first: _First


class Lifetimes:
    """Remembers who used memory first, and collects the uses of memory that another pass had used before."""

    def __init__(self, microbatches: int, contents: Contents) -> None:
        self.microbatches = microbatches  # of the step that ends next
        self._contents = contents
        self._first: dict[tuple[str, int], _First] = {}  # by address
        self._again: list[_Again] = []
        self._calls: Counter[tuple[str, CastPhase]] = Counter()  # in this step
        self._microbatch: dict[Pass, int] = {}  # of passes of steps that ended, while memory of theirs is in use
        self._of_model: set[int] = set()
        self._gathered: set[str] = set()
        self._frozen: set[str] = set()

    def attach(self, model: nn.Module, gathered: Collection[str]) -> None:
        """A model keeps its parameters and buffers over steps; FSDP2 the memory of the weights of `gathered` modules.

        It writes them without a new version.
        """
        self._gathered = set(gathered)
        held = (*model.parameters(), *model.buffers())
        self._of_model = {_storage(local_part(tensor)) for tensor in held}
        frozen = (name for name, param in model.named_parameters() if not param.requires_grad)
        self._frozen = {clean_fqn(name).rpartition(".")[0] for name in frozen}

    def begin(self, step: int, fqn: str, phase: CastPhase) -> Pass:
        """Return the record of a module call."""
        if fqn == UNKNOWN:
            return Pass(step, fqn, phase, 0)
        self._calls[fqn, phase] += 1
        return Pass(step, fqn, phase, self._calls[fqn, phase])

    def cast(self, use: Use, cast: Cast, content: Content) -> None:
        """A tensor was cast, and its result has this content."""
        self._look("data", use, cast.bits, lambda: content)
        if use.role == "weight" and use.by.fqn not in self._gathered:
            self._look("source", use, cast.source, lambda: None)
        self._look("scale", use, cast.scale, lambda: _content(cast.scale), source=_version(cast.source))

    def multiply(self, use: Use, *, data: torch.Tensor, scale: torch.Tensor) -> None:
        """A matmul reads an operand. A scale is looked at where the data is not what this very call has cast."""
        first = self._first.get(("data", data.data_ptr()))
        if first is not None and first.by == use.by and not first.storage.expired():
            return
        self._look("data", use, data, lambda: self._contents.read(data))
        self._look("scale", use, scale, lambda: _content(scale))

    def _look(
        self,
        kind: Literal["data", "scale", "source"],
        use: Use,
        tensor: torch.Tensor,
        read: Callable[[], Content | None],
        *,
        source: _Version | None = None,
    ) -> None:
        address, version = _version(tensor)
        if not address:
            return  # it has no elements
        first = self._first.get((kind, address))
        if first is None or first.storage.expired() or version > first.version:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._first[kind, address] = _First(storage, version, read(), use.by, use.role, source)
            return
        is_other = source is not None and first.source is not None and _are_others(use, source, first, first.source)
        if (not is_other and first.by == use.by) or _storage(tensor) in self._of_model:
            return
        content = read()
        if content is not None and first.content is not None and not content.is_same(first.content):
            self._first[kind, address] = _First(first.storage, version, content, use.by, use.role, source)
        elif not _changes_nothing(tensor):
            self._again.append(_Again("other_scale" if is_other else kind, use, first))

    def end_step(self) -> list[Aged]:
        """Return what was used again that is of another step, or an activation of another microbatch."""
        self._first = {place: first for place, first in self._first.items() if not first.storage.expired()}
        passes = {module_pass for again in self._again for module_pass in (again.use.by, again.first.by)}
        passes |= {first.by for first in self._first.values()}
        self._microbatch = {
            module_pass: self._microbatch.get(module_pass) or self._microbatch_of(module_pass) for module_pass in passes
        }
        self._calls.clear()
        aged = [self._aged(again) for again in self._again if self._is_aged(again)]
        self._again.clear()
        return aged

    def _microbatch_of(self, module_pass: Pass) -> int:
        """Calls of a module are spread over microbatches evenly, in order; 0 where it is not known."""
        if module_pass.number == 0:
            return 0
        return (module_pass.number - 1) * self.microbatches // self._calls[module_pass.fqn, module_pass.phase] + 1

    def _is_aged(self, again: _Again) -> bool:
        use, first = again.use, again.first.by
        if again.what == "other_scale":
            return True
        if use.role == "weight":
            return use.by.step != first.step and use.by.fqn not in self._frozen
        mine, others = self._microbatch[use.by], self._microbatch[first]
        evaluated = (use.by.phase == "evaluation") != (first.phase == "evaluation")
        return use.by.step != first.step or evaluated or (mine != others and mine > 0 and others > 0)

    def _aged(self, again: _Again) -> Aged:
        use, first = again.use, again.first.by
        return Aged(
            index=use.order,
            what=again.what,
            step=use.by.step,
            fqn=first.fqn if use.by.fqn == UNKNOWN else use.by.fqn,
            role=use.role,
            where=use.where,
            microbatch=self._microbatch[use.by],
            first_step=first.step,
            first_fqn=first.fqn,
            first_role=again.first.role,
            first_phase=first.phase,
            first_microbatch=self._microbatch[first],
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _version(tensor: torch.Tensor) -> _Version:
    return _Version(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


def _content(scale: torch.Tensor) -> Content:
    return Content(bytes_of(scale, transposed=False))


def _are_others(use: Use, source: _Version, first: _First, before: _Version) -> bool:
    """Whether two different tensors were cast. Another version of a weight, or another copy, is still that weight."""
    if use.role != "weight":
        return source != before
    if first.role != "weight" or UNKNOWN in (use.by.fqn, first.by.fqn):
        return source.address != before.address
    return use.by.fqn != first.by.fqn


def _changes_nothing(scale: torch.Tensor) -> bool:
    """Return True for a scale of 1, which may be kept as a constant."""
    return scale.dtype == torch.float32 and scale.numel() == 1 and float(scale) == 1
