"""Supervises the share of one job: starts its ranks, detects the first failure, collects stacks, ends every process.

A state machine driven by the selector loop of `fork_server.py`: rank sockets and pidfds call back through the selector,
and `tick` advances the state. Never blocks.
"""

import enum
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from harness.engine import linux
from harness.engine.messages import Share, ShareEvent, ShareOutcome
from harness.engine.processes import JobFolder
from harness.engine.program import FORK_BLOCKERS, RankMain
from harness.engine.rank import RankProcess

GRACE_S = 0.5  # after the first failure, other ranks may still report their own
DUMP_S = 0.2  # from requesting stacks to SIGKILL; faulthandler needs milliseconds even with 100 threads
RELEASE_S = 2.0  # a released rank only has to call os._exit
DEATH_S = 20.0  # from SIGKILL to giving up on a process: only a broken driver keeps it alive that long
SWEEP_POLL_S = 0.01
LOG_POLL_S = 0.5  # how often the size of logs is read
BARRIER_S = 10.0  # after the deadline, until a share whose ranks have all returned waits for no other node any more


class Stage(enum.Enum):
    RUNNING = "running"
    GRACE = "grace"  # a rank has failed, others may still report
    DUMPING = "dumping"  # waiting for the stacks of the other ranks
    BARRIER = "barrier"  # every rank of this share returned, those of other nodes have not
    RELEASED = "released"  # every rank returned and may exit
    KILLED = "killed"
    SWEEPING = "sweeping"  # all ranks are reaped, orphans are being killed
    DONE = "done"


class Supervisor:
    """Runs one share. Call `start` once, then `tick` after every callback and at `wakeup_s`, until `outcome` is set.

    Where other nodes have shares of the job, `report` gets what they must know.
    """

    def __init__(
        self,
        share: Share,
        rank_main: RankMain,
        selector: selectors.BaseSelector,
        live_pids: Callable[[], frozenset[int]],
        report: Callable[[ShareEvent], None],
    ) -> None:
        self.outcome: ShareOutcome | None = None
        self._share = share
        self._folder = JobFolder(Path(share.folder))
        self._report = report
        self._rank_main = rank_main
        self._selector = selector
        self._live_pids = live_pids  # ranks of all shares: any other child is an orphan
        self._ranks: list[RankProcess] = []
        self._stage = Stage.RUNNING
        self._started_s = time.monotonic()
        self._until_s = self._started_s + share.job.deadline_s
        self._logs_due_s = self._started_s + LOG_POLL_S
        self._detected_s: float | None = None
        self._hung = False
        self._infra = ""
        self._orphans_cpu_s = 0.0
        self._shm_before = linux.shm_files()
        self._shm: frozenset[str] = frozenset()  # files in /dev/shm that the ranks left
        self._steps: dict[Stage, Callable[[float], None]] = {
            Stage.RUNNING: self._run,
            Stage.GRACE: self._grace,
            Stage.DUMPING: self._dumping,
            Stage.BARRIER: self._barrier,
            Stage.RELEASED: self._released,
            Stage.KILLED: self._killed,
            Stage.SWEEPING: self._sweep,
        }

    @property
    def wakeup_s(self) -> float:
        """Return when to call `tick` next if no callback runs earlier, in time.monotonic() seconds."""
        if self._stage is Stage.SWEEPING:
            return time.monotonic() + SWEEP_POLL_S
        return min(self._until_s, self._logs_due_s)

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(rank.pid for rank in self._ranks if rank.alive)

    def start(self, keep_fds: frozenset[int]) -> None:
        """Fork all ranks. An error here ends the share as `infra`."""
        obstacle = FORK_BLOCKERS.reason()
        if obstacle:
            self.abort(obstacle)
            return
        try:
            self._folder.prepare()
            for number in self._share.ranks:
                rank = RankProcess(self._share, number, started_s=self._started_s, selector=self._selector)
                rank.start(self._rank_main, keep_fds)
                self._ranks.append(rank)
        except OSError as error:
            number = self._share.first_rank + len(self._ranks)
            self.abort(f"could not start rank {number} of {self._share.job.world_size}: {error}")

    def abort(self, reason: str) -> None:
        if self._stage in (Stage.SWEEPING, Stage.DONE):
            return
        self._infra = reason
        self._record_failure(time.monotonic())
        self._kill()

    def end(self) -> None:
        """End the share now, with the stacks of its ranks: one on another node has failed."""
        if self._stage in (Stage.RUNNING, Stage.GRACE, Stage.BARRIER):
            self._request_stacks(final=True)

    def release(self) -> None:
        """Let the ranks exit: those of other nodes have returned too."""
        if self._stage is Stage.BARRIER:
            for rank in self._ranks:
                rank.release()
            self._enter(Stage.RELEASED, RELEASE_S)

    def tick(self, now_s: float) -> None:
        """Advance as many stages as possible without waiting."""
        if now_s >= self._logs_due_s:
            self._folder.bound_logs(self._share.ranks)
            self._logs_due_s = now_s + LOG_POLL_S
        while self._stage is not Stage.DONE:
            before = self._stage
            self._steps[before](now_s)
            if self._stage is before:
                return

    @property
    def _reported(self) -> bool:
        return all(rank.outcome is not None for rank in self._ranks)

    @property
    def _failed(self) -> bool:
        return any(rank.outcome is not None and rank.outcome.status != "returned" for rank in self._ranks)

    @property
    def _all_dead(self) -> bool:
        return not any(rank.alive for rank in self._ranks)

    def _record_failure(self, now_s: float) -> None:
        if self._detected_s is None:
            self._detected_s = now_s - self._started_s
            self._tell("failed")

    def _tell(self, event: ShareEvent) -> None:
        if not self._share.is_whole:
            self._report(event)

    def _enter(self, stage: Stage, seconds: float) -> None:
        self._stage = stage
        self._until_s = time.monotonic() + seconds

    def _run(self, now_s: float) -> None:
        if self._failed:
            self._record_failure(now_s)
            self._enter(Stage.GRACE, GRACE_S)
        elif self._reported:
            self._record_shared_memory()
            self._enter(Stage.BARRIER, max(0.0, self._until_s - now_s) + BARRIER_S)
            self._tell("returned")
            if self._share.is_whole:
                self.release()
        elif now_s >= self._until_s:
            self._hung = True
            self._record_failure(now_s)
            self._request_stacks(final=True)

    def _grace(self, now_s: float) -> None:
        if self._reported:
            self._kill()
        elif now_s >= self._until_s:
            self._request_stacks(final=False)

    def _request_stacks(self, *, final: bool) -> None:
        for rank in self._ranks:
            rank.request_stacks(final=final)
        self._enter(Stage.DUMPING, DUMP_S)

    def _dumping(self, now_s: float) -> None:
        if self._reported or now_s >= self._until_s:
            self._kill()

    def _record_shared_memory(self) -> None:
        appeared = linux.shm_files() - self._shm_before
        if appeared:
            self._shm |= linux.shm_files_used_by(self.pids, appeared)

    def _kill(self) -> None:
        self._record_shared_memory()
        for rank in self._ranks:
            rank.kill()
        self._enter(Stage.KILLED, DEATH_S)

    def _barrier(self, now_s: float) -> None:
        if self._failed:
            self._record_failure(now_s)
            self._kill()
        elif now_s >= self._until_s:
            self._kill()  # its ranks have returned their results: another share has failed

    def _released(self, now_s: float) -> None:
        if self._all_dead and self._failed:
            self._record_failure(now_s)
            self._kill()
        elif self._all_dead:
            self._enter(Stage.SWEEPING, DEATH_S)
        elif now_s >= self._until_s:
            self._kill()  # it has returned its result, so a slow exit is no failure

    def _killed(self, now_s: float) -> None:
        if self._all_dead:
            self._enter(Stage.SWEEPING, DEATH_S)
        elif now_s >= self._until_s:
            survivors = [f"rank {rank.rank} (pid {rank.pid})" for rank in self._ranks if rank.alive]
            self._finish(f"{', '.join(survivors)} survived SIGKILL for {DEATH_S:g} s: the driver or the disk is stuck")

    def _sweep(self, now_s: float) -> None:
        orphans, cpu_s = linux.kill_orphans(self._live_pids())
        self._orphans_cpu_s += cpu_s
        if not orphans:
            self._finish(self._infra)
        elif now_s >= self._until_s:
            self._finish(f"processes {orphans} left by the ranks survived SIGKILL for {DEATH_S:g} s")

    def _finish(self, infra: str) -> None:
        for rank in self._ranks:
            if rank.alive:
                rank.unwatch()
        linux.remove_shm_files(self._shm)
        self._folder.bound_logs(self._share.ranks)
        self.outcome = ShareOutcome(
            ranks=tuple(rank.outcome for rank in self._ranks if rank.outcome is not None),
            hung=self._hung,
            infra=infra,
            wall_s=time.monotonic() - self._started_s,
            cpu_s=sum(rank.cpu_s for rank in self._ranks) + self._orphans_cpu_s,
            detected_s=self._detected_s,
        )
        self._stage = Stage.DONE
