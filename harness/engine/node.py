"""A node: one machine's slots, job folders, fork servers and hardware, as the controller of a run uses them.

`LocalNode` is this machine. `cluster.py` decides which node runs what.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from harness.durable import take_lock
from harness.engine.hardware import NodeCapacity
from harness.engine.leases import Leases
from harness.engine.messages import Message, Share, ShareEvent, ShareOutcome

ALONE = "alone"  # option whose value is the id of a job: only that job uses ranks preloaded with it


class NodeLost(Exception):
    """A node was lost; the text names it and says why."""


class Reservation(Message, frozen=True, kw_only=True):
    slots: tuple[int, ...]
    folder: str


class RunsShares(Protocol):
    """What a node and a runner have in common. Methods are called from several threads. Ids of running jobs differ."""

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        """Run a share and return its outcome. `report` gets the events that other nodes need, in any thread."""

    def end(self, job_id: str) -> None:
        """End the share of this job at once: a rank on another node failed."""

    def release(self, job_id: str) -> None:
        """Let the ranks of this job exit: all of them have returned, on all nodes."""

    def close(self) -> None:
        """Kill every rank and what it is forked from."""


class Runner(RunsShares, Protocol):
    """Starts ranks on this machine: `ForkServerEngine`, or the torchrun of a plug-in."""

    def warm(self) -> None:
        """Warm up, so that ranks start at once. `run` reports a failure to do so."""


class Node(RunsShares, Protocol):
    """One machine. Each method may raise NodeLost."""

    name: str
    capacity: NodeCapacity

    def reserve(self, job_id: str, count: int) -> Reservation:
        """Hold slots and a folder until `free`. Waits for slots that other processes hold. Raises OSError."""

    def warm(self, preload: Mapping[str, str]) -> None:
        """`Runner.warm`, for ranks with these options."""

    def free(self, job_id: str) -> None:
        """Give back the slots of a job, remove its folder unless logs are kept, and end what it has `ALONE`."""


class LocalNode:
    """This machine. `make` starts a runner of the rank program with these options, one for each distinct value.

    `leases` have as many slots as `capacity`. `logs`: keep the folders of jobs here; None uses a temporary folder.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, str]], Runner],
        leases: Leases,
        capacity: NodeCapacity,
        *,
        logs: Path | None = None,
    ) -> None:
        self.name = capacity.host
        self.capacity = capacity
        self._make = make
        self._leases = leases
        self._keeps = logs is not None
        self._scratch = Scratch()
        self._folder = logs or self._scratch.path
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._runners: dict[tuple[tuple[str, str], ...], Runner] = {}
        self._held: dict[str, ExitStack] = {}
        self._closed = False

    def reserve(self, job_id: str, count: int) -> Reservation:
        """Hold slots and a folder until `free`. Raises OSError, and HarnessError if leases cannot be had."""
        with ExitStack() as held:
            slots = held.enter_context(self._leases.acquire(count))
            folder = self._folder / job_id
            folder.mkdir()  # without its parent: `close` may have removed that
            if not self._keeps:
                held.callback(shutil.rmtree, folder, ignore_errors=True)
            with self._lock:
                self._held[job_id] = held.pop_all()
        return Reservation(slots=slots, folder=str(folder))

    def free(self, job_id: str) -> None:
        with self._lock:
            held = self._held.pop(job_id, None)
            own = [self._runners.pop(key) for key in tuple(self._runners) if (ALONE, job_id) in key]
        for runner in own:
            runner.close()
        if held is not None:
            held.close()

    def warm(self, preload: Mapping[str, str]) -> None:
        self._runner(preload).warm()

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        return self._runner(share.job.preload).run(share, report)

    def end(self, job_id: str) -> None:
        for runner in self._all_runners():
            runner.end(job_id)

    def release(self, job_id: str) -> None:
        for runner in self._all_runners():
            runner.release(job_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for runner in self._all_runners():
            runner.close()
        self._scratch.close()

    def _runner(self, preload: Mapping[str, str]) -> Runner:
        with self._lock:
            key = tuple(sorted(preload.items()))
            if key not in self._runners:
                self._runners[key] = self._make(preload)
                if self._closed:
                    self._runners[key].close()
            return self._runners[key]

    def _all_runners(self) -> tuple[Runner, ...]:
        with self._lock:
            return tuple(self._runners.values())


_PREFIX = "fp8-harness-jobs-"
_LOCK = "owner.lock"


class Scratch:
    """A new folder below `parent` (default: that of tempfile), until `close`. Removes those of killed runs.

    Its owner holds a lock on a file in it, which the kernel frees with the process. So a folder whose lock is free is
    nobody's, whatever became of pids since, also between containers that share a disk.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
            with suppress(OSError):  # it is held, or another user's, or gone by now
                fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                try:
                    take_lock(fd)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(fd)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unseen = self.path / f"{_LOCK}.new"
        self._lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        take_lock(self._lock, wait=True)
        unseen.rename(self.path / _LOCK)  # nobody sees it before it is locked

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
