"""Leases: who may use which slots (device indices, or places for CPU ranks) of this box, across processes.

A slot is a file; holding it is holding the kernel's lock on it, so a killed holder frees its slots at once and a
stale file means nothing. Shared by threads, pytest-xdist workers and other jobs that use the same folder. It does not
know what a slot is for (`devices.py`).

flock is used directly: the filelock package falls back to locks without a kernel behind them where flock is missing,
and those outlive their holder.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import HarnessError

POLL_S = 0.01  # a waiting thread costs about 0.3 ms of CPU per second at this pace


class Leases:
    """Slots 0 to `slots` - 1, locked in `folder`. Jobs that name a slot alike share it; default names are numbers."""

    def __init__(self, folder: Path, slots: int, *, names: Sequence[str] | None = None) -> None:
        assert names is None or len(names) == slots, "one name per slot"
        self._folder = folder
        self._paths = [folder / f"slot-{name}.lock" for name in names or range(slots)]

    @contextmanager
    def acquire(self, count: int, timeout_s: float | None = None) -> Iterator[tuple[int, ...]]:
        """Hold `count` slots at once; yields their indices, ascending. Raises HarnessError, also after `timeout_s`.

        Whoever comes first gets all its slots first: one waiter at a time collects, the others queue behind it. So
        large requests do not starve and two half-served ones cannot block each other.
        """
        if count > len(self._paths):
            raise HarnessError(
                f"{count} slots are needed and there are {len(self._paths)}",
                where=f"leases in {self._folder}",
                fix="allow more slots, or leave out cases with more ranks",
            )
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with ExitStack() as held:
            with ExitStack() as turn:
                self._wait_for_turn(turn, until_s)
                slots = self._collect(held, count, until_s)
            yield slots

    def _wait_for_turn(self, turn: ExitStack, until_s: float | None) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        while not self._lock(self._folder / "queue.lock", turn):
            self._pause(until_s)

    def _collect(self, held: ExitStack, count: int, until_s: float | None) -> tuple[int, ...]:
        slots: set[int] = set()
        while True:
            for slot, path in enumerate(self._paths):
                if len(slots) < count and slot not in slots and self._lock(path, held):
                    slots.add(slot)
            if len(slots) == count:
                return tuple(sorted(slots))
            self._pause(until_s)

    def _pause(self, until_s: float | None) -> None:
        if until_s is not None and time.monotonic() >= until_s:
            raise HarnessError(
                f"the slots did not become free in time; there are {len(self._paths)}",
                where=f"leases in {self._folder}",
                fix="wait for the other runs on this machine, or allow more time",
            )
        time.sleep(POLL_S)

    def _lock(self, path: Path, held: ExitStack) -> bool:
        """Lock a file if nobody holds it, until `held` closes."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            raise self._unusable(error) from error
        held.callback(os.close, fd)
        return True

    def _unusable(self, error: OSError) -> HarnessError:
        return HarnessError(
            f"the lease folder cannot be used: {error}",
            where=f"leases in {self._folder}",
            fix="name another folder: a local one that you can write to",
        )
