"""Reasons of what is counted: matmuls, collectives, saved bytes and fused operators, equal on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from harness.gate.reason import Kind, Reason, Topic
from harness.gate.sides import Pair, Sides
from harness.measured import Measured


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """One number that changed. None: not counted on that side."""

    what: str
    before: int | None
    after: int | None

    @property
    def relative(self) -> float:
        """How far the candidate is from the baseline, relative to it; 1 where one side has none."""
        if not self.before or self.after is None:
            return 1.0
        return abs(self.after - self.before) / self.before

    @property
    def text(self) -> str:
        """As one line."""
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.after)}"


def changed_counts(sides: Sides) -> Iterable[Reason]:
    """A reason for every case and kind of count that is not the one of the baseline, to the last byte."""
    for pair in sides.compared if sides.same_device else ():
        before, after = pair.baseline.measured, pair.candidate.measured
        if before is None or after is None:
            continue
        if not before.flops:  # an older version did not count them
            after = replace(after, flops={})
        for kind, old, new in zip(_KINDS, _counted(before), _counted(after), strict=True):
            changed = [
                Count(what=name, before=old.get(name), after=new.get(name))
                for name in dict.fromkeys((*old, *new))
                if old.get(name) != new.get(name)
            ]
            if changed:
                yield _reason(kind, pair, changed)


_KINDS = (Kind.MATMULS, Kind.WIRE, Kind.SAVED_BYTES, Kind.FUSED)
_TOPICS = dict(zip(_KINDS, (Topic.MATMULS, Topic.TRAFFIC, Topic.MEMORY, Topic.FUSION), strict=True))


def _counted(found: Measured) -> tuple[Mapping[str, int], ...]:
    """The numbers of every kind, by name."""
    wire = {
        f"{unit} of {name}": value
        for name, sent in found.wire.items()
        for unit, value in (("bytes", sent.payload_bytes), ("calls", sent.calls))
    }
    matmuls = {
        **({} if found.scaled_mm_calls is None else {"scaled_mm calls": found.scaled_mm_calls}),
        **{f"FLOPs of {name}": multiplied.flops for name, multiplied in found.flops.items()},
        **{f"calls of {name}": multiplied.calls for name, multiplied in found.flops.items()},
    }
    saved = {} if found.saved_bytes is None else {"bytes saved for backward": found.saved_bytes}
    return matmuls, wire, saved, found.fused


def _reason(kind: Kind, pair: Pair, changed: list[Count]) -> Reason:
    largest = max(changed, key=lambda count: count.relative)
    return Reason(
        kind=kind,
        case=pair.id,
        what=largest.text,
        baseline=_shown(largest.before),
        candidate=_shown(largest.after),
        size=largest.relative,
        command=pair.candidate.command,
        topics=(_TOPICS[kind],),
        details=tuple(count.text for count in changed if count is not largest),
    )


def _shown(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"
