"""Leases: hand out the slots of this machine (device indices, or CPU ranks) across processes.

A slot is a file and a lease is an flock on it, so the kernel frees the slots of a killed holder and leftover files do
no harm. Works across threads, pytest-xdist workers and all jobs that use the same folder. `devices.py` names the slots.

Not the filelock package: where flock is missing it falls back to lock files that outlive their holder.
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
    """Slots 0 to `slots` - 1, locked in `folder`. Jobs share slots of the same name (default: the number)."""

    def __init__(self, folder: Path, slots: int, *, names: Sequence[str] | None = None) -> None:
        assert names is None or len(names) == slots, "one name per slot"
        self._folder = folder
        self._paths = [folder / f"slot-{name}.lock" for name in names or range(slots)]

    @contextmanager
    def acquire(self, count: int, timeout_s: float | None = None) -> Iterator[tuple[int, ...]]:
        """Hold `count` slots at once; yields their indices, ascending. Raises HarnessError, also after `timeout_s`.

        First come, first served: one waiter at a time collects slots and the others queue behind it, so large requests
        do not starve and two partly served ones cannot deadlock.
        """
        if count > len(self._paths):
            raise HarnessError(
                f"needs {count} slots, but there are only {len(self._paths)}.",
                where=f"leases in {self._folder}",
                fix="raise --slots, or leave out the cases with more ranks.",
            )
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with ExitStack() as held:
            with ExitStack() as queue:
                self._wait_in_queue(queue, until_s)
                slots = self._collect(held, count, until_s)
            yield slots

    def held(self) -> tuple[int, ...]:
        """The slots that a job holds now. Takes each of the others for a moment."""
        found = []
        for slot, path in enumerate(self._paths):
            with ExitStack() as taken:
                if path.exists() and not self._lock(path, taken):
                    found.append(slot)
        return tuple(found)

    def _wait_in_queue(self, queue: ExitStack, until_s: float | None) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        while not self._lock(self._folder / "queue.lock", queue):
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
                f"timed out waiting for slots; there are {len(self._paths)}.",
                where=f"leases in {self._folder}",
                fix="wait for the other runs on this machine to finish.",
            )
        time.sleep(POLL_S)

    def _lock(self, path: Path, held: ExitStack) -> bool:
        """Lock a file until `held` closes; returns False when another process holds it."""
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
            f"cannot use the lease folder: {error}.",
            where=f"leases in {self._folder}",
            fix="set FP8_HARNESS_STATE to a writable folder on a local disk.",
        )
