"""The slot table of a cluster: which nodes the ranks of a job run on. In memory; `leases.py` serves other processes."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from harness.errors import HarnessError


class TableClosed(Exception):
    """The table was closed while a job waited for slots, or before."""


class SlotTable:
    """Free slots by the name of a node. Thread-safe.

    First come, first served: nobody overtakes the job that waits longest, so large jobs do not starve.
    `spread`: use the emptiest node first, for slots that share cores; else the fullest, so that others stay whole.
    """

    def __init__(self, slots: Mapping[str, int], *, spread: bool = False) -> None:
        self._spread = spread
        self._total = dict(slots)
        self._free = dict(slots)
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many jobs wait for slots."""
        return len(self._waiting)

    @contextmanager
    def taken(self, count: int, *, one_node: bool) -> Iterator[Mapping[str, int]]:
        """Hold `count` slots; yields how many on which node. Waits for them.

        Raises HarnessError at once when the nodes can never hold so many, and TableClosed.
        """
        placement = self._take(count, one_node=one_node)
        try:
            yield placement
        finally:
            with self._changed:
                for name, number in placement.items():
                    if name in self._free:
                        self._free[name] += number
                self._changed.notify_all()

    def drop_node(self, name: str) -> None:
        """Remove a lost node: hand out none of its slots any more."""
        with self._changed:
            self._total.pop(name, None)
            self._free.pop(name, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more; whoever waits gets TableClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, count: int, *, one_node: bool) -> Mapping[str, int]:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while True:
                    if self._closed:
                        raise TableClosed
                    check_fits(self._total, count, one_node=one_node)
                    placement = (
                        place(self._free, self._total, count, spread=self._spread) if self._waiting[0] is me else None
                    )
                    if placement is not None:
                        break
                    self._changed.wait()
                for name, number in placement.items():
                    self._free[name] -= number
                return placement
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()


def check_fits(total: Mapping[str, int], count: int, *, one_node: bool) -> None:
    """Raises HarnessError when nodes with these slots can never run so many ranks at once."""
    largest = max(total.values(), default=0)
    if count <= largest or (not one_node and count <= sum(total.values())):
        return
    where = " on one node" if one_node and len(total) > 1 else ""
    raise HarnessError(
        f"needs {count} slots{where}, but there are only {largest if where else sum(total.values())}.",
        fix="raise --slots, or leave out the cases with more ranks.",
    )


def place(
    free: Mapping[str, int], total: Mapping[str, int], count: int, *, spread: bool = False
) -> dict[str, int] | None:
    """How many slots on which node, None when too few are free: whole on the fullest node that has room, or emptiest.

    What fits on no node is split over as few as possible. Expects a `count` that the nodes can hold.
    """
    if count <= max(total.values()):
        roomy = [name for name in free if free[name] >= count]
        return {(max if spread else min)(roomy, key=lambda name: free[name]): count} if roomy else None
    sums = itertools.accumulate(sorted(total.values(), reverse=True))
    fewest = next(number for number, slots in enumerate(sums, start=1) if slots >= count)
    placement: dict[str, int] = {}
    for name in sorted(free, key=lambda name: -free[name])[:fewest]:
        placement[name] = min(free[name], count - sum(placement.values()))
    return placement if sum(placement.values()) == count else None
