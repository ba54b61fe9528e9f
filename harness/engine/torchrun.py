"""The torchrun engine: one torchrun per job, every rank a new interpreter. Slow, and how users launch.

For comparing with the zygote engine, in results and in cost. It imports no torch: torchrun is a command to it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from harness.engine import linux
from harness.engine.ending import Ending, JobEnd, conclude, describe_exit, first_failure
from harness.engine.folder import JobFolder, tail
from harness.engine.interpreter import MARK, child_environ, module_command
from harness.engine.supervisor import DUMP_S
from harness.engine.wire import Job, JobOutcome, RankStatus

_SWEEP_S = 5.0


class RankFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank under torchrun is asked to do; written to `job.msgpack`."""

    program: str
    options: Mapping[str, str]
    job: Job
    started_s: float  # time.monotonic() of the controller


class TorchrunEngine:
    """Runs each job under its own torchrun with the rank program `program`, a dotted module name."""

    def __init__(self, program: str, options: Mapping[str, str] | None = None, python: str = sys.executable) -> None:
        self._program = program
        self._options = dict(options or {})
        self._python = python

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing outlives a job."""

    def run(self, job: Job) -> JobOutcome:
        """Run one job to its end and return its outcome; nothing of it is left then. Callable from any thread."""
        started_s = time.monotonic()
        folder = JobFolder(Path(job.folder))
        try:
            folder.prepare()
            for rank in range(job.world_size):
                for path_of in (ending_path, pid_path, phase_path):
                    path_of(folder, rank).unlink(missing_ok=True)
            orders = RankFile(program=self._program, options=self._options, job=job, started_s=started_s)
            job_path(folder).write_bytes(msgspec.msgpack.encode(orders))
            return _Launch(job, folder, started_s).run(self._command(job, folder))
        except OSError as error:
            return JobOutcome(job_id=job.job_id, status="infra", ranks=(), message=f"could not start torchrun: {error}")

    def _command(self, job: Job, folder: JobFolder) -> list[str]:
        rank = module_command(self._python, "harness.engine.torchrun_rank", [str(folder.path)])
        launch = ["--standalone", "--nproc-per-node", str(job.world_size), "--no-python", *rank]
        return [self._python, "-P", "-m", "torch.distributed.run", *launch]


def job_path(folder: JobFolder) -> Path:
    """Where the orders for all ranks are."""
    return folder.path / "job.msgpack"


def ending_path(folder: JobFolder, rank: int) -> Path:
    """Where a rank writes how it ended."""
    return folder.path / f"rank{rank}.ending"


def pid_path(folder: JobFolder, rank: int) -> Path:
    """Where a rank writes its pid."""
    return folder.path / f"rank{rank}.pid"


def phase_path(folder: JobFolder, rank: int) -> Path:
    """Where a rank writes what it does."""
    return folder.path / f"rank{rank}.phase"


class _Launch:
    """One running torchrun."""

    def __init__(self, job: Job, folder: JobFolder, started_s: float) -> None:
        self._job = job
        self._folder = folder
        self._started_s = started_s
        self._mark = uuid.uuid4().hex
        self._hung = False

    def run(self, command: list[str]) -> JobOutcome:
        environ = child_environ({MARK: self._mark, "TMPDIR": str(self._folder.tmp)})
        log_path = self._folder.path / "torchrun.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        try:
            self._wait(process.pid)
        finally:
            self._end_all(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return self._conclude(process.returncode, usage.ru_utime + usage.ru_stime, tail(log_path))

    def _wait(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            left_s = self._started_s + self._job.deadline_s - time.monotonic()
            self._hung = not poll.poll(max(0.0, left_s) * 1000)
        finally:
            os.close(pidfd)
        if self._hung:
            self._ask_for_stacks()
            time.sleep(DUMP_S)

    def _ask_for_stacks(self) -> None:
        for rank in range(self._job.world_size):
            path = pid_path(self._folder, rank)
            if path.exists() and not ending_path(self._folder, rank).exists():
                with suppress(ProcessLookupError, ValueError):  # it has just ended, or just begun to write
                    os.kill(int(path.read_text()), signal.SIGUSR1)

    def _end_all(self, pid: int) -> None:
        """torchrun gives every rank a session of its own, so its group is not enough: find all by their mark."""
        os.killpg(pid, signal.SIGKILL)
        give_up_s = time.monotonic() + _SWEEP_S
        while linux.kill_marked(MARK, self._mark) and time.monotonic() < give_up_s:
            time.sleep(0.005)

    def _conclude(self, returncode: int, cpu_s: float, log: str) -> JobOutcome:
        now_s = time.monotonic() - self._started_s
        endings = tuple(self._ending(rank, now_s) for rank in range(self._job.world_size))
        cause = first_failure(endings)
        infra = ""
        if cause and not self._hung and cause.phase in ("", "preload"):
            how = describe_exit(returncode, returned=False, oom_kills=0)[1]
            infra = f"rank {cause.rank} did not start: {cause.message}; torchrun {how}\n{cause.log_tail or log}"
        end = JobEnd(
            endings=endings,
            hung=self._hung,
            infra=infra,
            wall_s=now_s,
            cpu_s=cpu_s,
            detected_s=cause.at_s if cause else None,
        )
        return conclude(self._job, end)

    def _ending(self, rank: int, now_s: float) -> Ending:
        path = ending_path(self._folder, rank)
        if path.exists():
            return msgspec.msgpack.decode(path.read_bytes(), type=Ending)
        stacks = self._folder.dump_text(rank)
        status, message = self._guess(stacks)
        return Ending(
            rank=rank,
            status=status,
            at_s=now_s,
            message=message,
            traceback=stacks,
            phase=tail(phase_path(self._folder, rank)),
            log_tail=self._folder.log_tail(rank),
        )

    def _guess(self, stacks: str) -> tuple[RankStatus, str]:
        """What became of a rank that left no ending; only torchrun's log has its exit code."""
        if stacks.startswith("Fatal Python error"):
            return "signalled", stacks.splitlines()[0]
        if self._hung:
            return "stuck", "did not finish"
        if stacks:
            return "stuck", "did not finish: torchrun ended it after another rank had failed"
        return "exited", "exited without a result; its exit code is in torchrun.log"
