"""The census in the record of saved memory: which storages were alive at a moment of a step, and which are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from harness.expect.live_memory import LiveStorage
from harness.plural import counted
from harness.trace import RankTrace
from harness.trace.counts import LiveMemory, LiveTensor, Moment

S = TypeVar("S", LiveTensor, LiveStorage)


def census(trace: RankTrace) -> Mapping[tuple[Moment, int], LiveMemory]:
    """What was alive on a rank, by moment and step."""
    return {(live.moment, record.step): live for record in trace.saved_memory or () for live in record.live}


def contents(live: LiveMemory) -> tuple[int, list[tuple[str, int]]]:
    """The scalars, and dtype and bytes of all other storages: equal where as much is alive."""
    return live.scalars, sorted((tensor.dtype, tensor.nbytes) for tensor in live.tensors)


def beyond(storages: Iterable[S], others: Iterable[LiveTensor | LiveStorage]) -> list[S]:
    """What is left when every storage is paired with another of its dtype and size."""
    unpaired = Counter((each.dtype, each.nbytes) for each in others)
    left = []
    for each in storages:
        unpaired[each.dtype, each.nbytes] -= 1
        if unpaired[each.dtype, each.nbytes] < 0:
            left.append(each)
    return left


def largest_of(tensors: list[LiveTensor]) -> tuple[str, str]:
    """The largest tensor in words, and the module that holds it; of equal ones one that a module holds."""
    most = max(tensors, key=lambda each: (each.nbytes, bool(each.holder)))
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    holder = most.holder or "no module"
    return f"{most.dtype}{list(most.shape)} of {holder}{others}", holder


def amount(storages: Iterable[LiveTensor | LiveStorage], scalars: int) -> str:
    """How much is alive, as text."""
    return f"{sum(each.nbytes for each in storages)} bytes, and {counted(scalars, 'scalar')}"
