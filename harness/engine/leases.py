"""Leases: hand out the slots of this machine (device indices, or CPU ranks) across processes.

A slot is a file and a lease is an flock on it, so the kernel frees the slots of a killed holder and leftover files do
no harm. Works across threads, pytest-xdist workers and all jobs that use the same folder.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from harness.durable import take_lock
from harness.engine.linux import command_of
from harness.errors import HarnessError

POLL_S = 0.01  # a waiting thread costs about 0.3 ms of CPU per second at this pace
_NOTICE_AFTER_S = 3.0


class Leases:
    """Slots 0 to `slots` - 1, locked in `folder`. Jobs share slots of the same name (default: the number).

    `note` gets who holds the slots that it waits for. A slot file holds the pid of its last holder.
    """

    def __init__(
        self,
        folder: Path,
        slots: int,
        *,
        names: Sequence[str] | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        assert names is None or len(names) == slots, "one name per slot"
        self._folder = folder
        self._note = note
        self._last_note = ""  # so that nothing is noted twice
        self._paths = [folder / f"slot-{name}.lock" for name in names or range(slots)]

    @contextmanager
    def acquire(self, count: int) -> Iterator[tuple[int, ...]]:
        """Hold `count` slots at once; yields their indices, ascending. Raises HarnessError.

        First come, first served: one waiter at a time collects slots and the others queue behind it, so large requests
        do not starve and two partly served ones cannot deadlock.
        """
        assert count <= len(self._paths), "`Cluster` asks for no more slots than there are"
        pauses = self._pauses()
        with ExitStack() as held:
            with ExitStack() as queue:
                self._wait_in_queue(queue, pauses)
                slots = self._collect(held, count, pauses)
            yield slots

    def held_slots(self) -> tuple[int, ...]:
        """Return the slots that any job holds now. Locks each free one for a moment to find out."""
        return tuple(slot for slot, path in enumerate(self._paths) if path.exists() and self._is_held(path))

    def _is_held(self, path: Path) -> bool:
        with ExitStack() as taken:
            return not self._lock(path, taken)

    def _wait_in_queue(self, queue: ExitStack, pauses: Iterator[None]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        while not self._lock(self._folder / "queue.lock", queue):
            next(pauses)

    def _collect(self, held: ExitStack, count: int, pauses: Iterator[None]) -> tuple[int, ...]:
        slots: set[int] = set()
        while True:
            for slot, path in enumerate(self._paths):
                if len(slots) < count and slot not in slots and self._lock(path, held):
                    slots.add(slot)
            if len(slots) == count:
                return tuple(sorted(slots))
            next(pauses)

    def _pauses(self) -> Iterator[None]:
        """Pauses between attempts. After some seconds a message says, once, who holds the slots."""
        notice_s = time.monotonic() + _NOTICE_AFTER_S
        while time.monotonic() < notice_s:
            time.sleep(POLL_S)
            yield
        if (others := self._others()) != self._last_note:
            self._last_note = others
            self._note(f"waits for slots of this machine, of which other runs hold some: {others}.")
        while True:
            time.sleep(POLL_S)
            yield

    def _others(self) -> str:
        """Return the other processes that hold slots, and how many, in words."""
        held: Counter[int] = Counter()
        for path in self._paths:
            with suppress(OSError, ValueError):  # it has not written its pid yet
                held[int(path.read_text()) if self._is_held(path) else os.getpid()] += 1
        del held[os.getpid()]
        return "; ".join(f"pid {pid} ({command_of(pid)}) {count} of {len(self._paths)}" for pid, count in held.items())

    def _lock(self, path: Path, held: ExitStack) -> bool:
        """Lock a file until `held` closes; returns False when another process holds it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            take_lock(fd)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            raise self._unusable(error) from error
        held.callback(os.close, fd)
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        return True

    def _unusable(self, error: OSError) -> HarnessError:
        return HarnessError(
            f"cannot use the lease folder: {error}.",
            where=f"leases in {self._folder}",
            fix="set FP8_HARNESS_STATE to a writable folder on a local disk.",
        )
