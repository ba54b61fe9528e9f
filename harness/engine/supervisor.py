"""The life of one job: start its ranks, see the first failure, collect stacks, end everything, tell how it ended.

A state machine driven by a selector loop that it does not own (`warm.py` does): rank sockets and pidfds call back
through the selector, `tick` moves the job on. Never blocks.
"""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from harness.engine import linux, sharedmem
from harness.engine.ending import JobEnd, conclude
from harness.engine.folder import JobFolder
from harness.engine.orphans import end_orphans
from harness.engine.program import RankProgram
from harness.engine.rankprocess import RankProcess
from harness.engine.wire import Job, JobOutcome

GRACE_S = 0.5  # after the first failure: ranks that fail by themselves in this time tell why themselves
DUMP_S = 0.2  # from asking for stacks to SIGKILL; faulthandler needs milliseconds even with 100 threads
RELEASE_S = 2.0  # a released rank leaves by os._exit
DEATH_S = 20.0  # from SIGKILL to giving up on a process, which only a broken driver keeps alive that long
SWEEP_POLL_S = 0.01


class Stage(enum.Enum):
    """Where a job is."""

    RUNNING = "running"
    GRACE = "grace"  # a rank has failed, the others may still say something
    DUMPING = "dumping"  # the rest was asked for its stacks
    RELEASED = "released"  # every rank returned and was told to leave
    KILLED = "killed"
    SWEEPING = "sweeping"  # all ranks are gone, what they left behind is being ended
    DONE = "done"


class Supervisor:
    """Runs one job. Call `start` once, `tick` whenever `wakeup_s` has passed or a callback ran, until `outcome`."""

    def __init__(
        self,
        job: Job,
        program: RankProgram,
        selector: selectors.BaseSelector,
        live_pids: Callable[[], frozenset[int]],
    ) -> None:
        self.job = job
        self.outcome: JobOutcome | None = None
        self._program = program
        self._selector = selector
        self._live_pids = live_pids  # ranks of all jobs: whoever else is our child is an orphan
        self._ranks: list[RankProcess] = []
        self._stage = Stage.RUNNING
        self._started_s = time.monotonic()
        self._until_s = self._started_s + job.deadline_s
        self._detected_s: float | None = None
        self._hung = False
        self._infra = ""
        self._orphans_cpu_s = 0.0
        self._shm_before = sharedmem.names()
        self._shm: frozenset[str] = frozenset()  # files in /dev/shm that our ranks made and have not removed
        self._steps: dict[Stage, Callable[[float], None]] = {
            Stage.RUNNING: self._run,
            Stage.GRACE: self._grace,
            Stage.DUMPING: self._dumping,
            Stage.RELEASED: self._released,
            Stage.KILLED: self._killed,
            Stage.SWEEPING: self._sweep,
        }

    @property
    def wakeup_s(self) -> float:
        """When `tick` must be called at the latest, in time.monotonic() seconds."""
        return time.monotonic() + SWEEP_POLL_S if self._stage is Stage.SWEEPING else self._until_s

    @property
    def pids(self) -> frozenset[int]:
        """Ranks that were not reaped yet."""
        return frozenset(rank.pid for rank in self._ranks if rank.alive)

    def start(self, keep_fds: frozenset[int]) -> None:
        """Fork all ranks. What goes wrong here is `infra`: the machine's fault, not the job's."""
        threads = linux.thread_names()
        if len(threads) > 1:
            self.abort(f"the warm process must be single-threaded to fork, but has the threads {', '.join(threads)}")
            return
        try:
            JobFolder(Path(self.job.folder)).prepare()
            for number in range(self.job.world_size):
                rank = RankProcess(self.job, number, started_s=self._started_s, selector=self._selector)
                rank.start(self._program, keep_fds)
                self._ranks.append(rank)
        except OSError as error:
            self.abort(f"could not start rank {len(self._ranks)} of {self.job.world_size}: {error}")

    def abort(self, reason: str) -> None:
        """End the job now; its outcome is `infra` with this reason."""
        if self._stage in (Stage.SWEEPING, Stage.DONE):
            return
        self._infra = reason
        self._see_failure(time.monotonic())
        self._kill()

    def tick(self, now_s: float) -> None:
        """Move on as far as possible without waiting."""
        while self._stage is not Stage.DONE:
            before = self._stage
            self._steps[before](now_s)
            if self._stage is before:
                return

    @property
    def _reported(self) -> bool:
        return all(rank.ending is not None for rank in self._ranks)

    @property
    def _failed(self) -> bool:
        return any(rank.ending is not None and rank.ending.status != "returned" for rank in self._ranks)

    @property
    def _all_dead(self) -> bool:
        return not any(rank.alive for rank in self._ranks)

    def _see_failure(self, now_s: float) -> None:
        if self._detected_s is None:
            self._detected_s = now_s - self._started_s

    def _enter(self, stage: Stage, seconds: float) -> None:
        self._stage = stage
        self._until_s = time.monotonic() + seconds

    def _run(self, now_s: float) -> None:
        if self._failed:
            self._see_failure(now_s)
            self._enter(Stage.GRACE, GRACE_S)
        elif self._reported:
            self._note_shared_memory()
            for rank in self._ranks:
                rank.release()
            self._enter(Stage.RELEASED, RELEASE_S)
        elif now_s >= self._until_s:
            self._hung = True
            self._see_failure(now_s)
            self._dump(final=True)

    def _grace(self, now_s: float) -> None:
        if self._reported:
            self._kill()
        elif now_s >= self._until_s:
            self._dump(final=False)

    def _dump(self, *, final: bool) -> None:
        for rank in self._ranks:
            rank.halt(final=final)
        self._enter(Stage.DUMPING, DUMP_S)

    def _dumping(self, now_s: float) -> None:
        if self._reported or now_s >= self._until_s:
            self._kill()

    def _note_shared_memory(self) -> None:
        appeared = sharedmem.names() - self._shm_before
        if appeared:
            self._shm |= sharedmem.used_by(self.pids, appeared)

    def _kill(self) -> None:
        self._note_shared_memory()
        for rank in self._ranks:
            rank.kill()
        self._enter(Stage.KILLED, DEATH_S)

    def _released(self, now_s: float) -> None:
        if self._all_dead and self._failed:
            self._see_failure(now_s)
            self._kill()
        elif self._all_dead:
            self._enter(Stage.SWEEPING, DEATH_S)
        elif now_s >= self._until_s:
            self._kill()  # it has given its result: whatever keeps it is not the job's failure

    def _killed(self, now_s: float) -> None:
        if self._all_dead:
            self._enter(Stage.SWEEPING, DEATH_S)
        elif now_s >= self._until_s:
            survivors = [f"rank {rank.rank} (pid {rank.pid})" for rank in self._ranks if rank.alive]
            self._finish(f"{', '.join(survivors)} survived SIGKILL for {DEATH_S:g} s: the driver or the disk is stuck")

    def _sweep(self, now_s: float) -> None:
        orphans, cpu_s = end_orphans(self._live_pids())
        self._orphans_cpu_s += cpu_s
        if not orphans:
            self._finish(self._infra)
        elif now_s >= self._until_s:
            self._finish(f"processes {orphans} left by the ranks survived SIGKILL for {DEATH_S:g} s")

    def _finish(self, infra: str) -> None:
        for rank in self._ranks:
            if rank.alive:
                rank.forget()
        sharedmem.remove(self._shm)
        end = JobEnd(
            endings=tuple(rank.ending for rank in self._ranks if rank.ending is not None),
            hung=self._hung,
            infra=infra,
            wall_s=time.monotonic() - self._started_s,
            cpu_s=sum(rank.cpu_s for rank in self._ranks) + self._orphans_cpu_s,
            detected_s=self._detected_s,
        )
        self.outcome = conclude(self.job, end)
        self._stage = Stage.DONE
