"""The torchrun engine: one torchrun per job, one new interpreter per rank. Slow, but the way users launch training.

The baseline for the results and the cost of the fork server engine. Does not import torch: it runs torchrun as a
command, which starts ranks by `python -m harness.plugins.launchers.torchrun FOLDER`, with RANK in the environment. A
rank reads the `LaunchSpec` in the folder, and writes its `RankOutcome` there.
"""

import faulthandler
import os
import re
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from harness.engine import linux
from harness.engine.messages import RankOutcome, RankStatus, Returned, Share, ShareEvent, ShareOutcome
from harness.engine.outcome import describe_exit, first_failure
from harness.engine.processes import MARK, JobFolder, module_command, read_end, start, tail
from harness.engine.program import RankContext, preload_program, rank_context
from harness.engine.rank import flush_streams, run_program
from harness.engine.supervisor import DUMP_S
from harness.engine.symptoms import MACHINE_SIGNALS

# What torchrun logs of the rank that failed first, and of a signal that it got itself.
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) ")
_GOT_SIGNAL = re.compile(r"SignalException: Process \d+ got signal: (?P<number>\d+)")
_LOG_BYTES = 1 << 20
# Ranks meet in a file of their folder, and so does the agent of torchrun, instead of --standalone. Its TCP stores would
# listen at every address of the machine, and it unpickles what it reads there.
_NO_TCP_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_OUTCOMES = msgspec.msgpack.Decoder(RankOutcome)  # made before any thread decodes: msgspec would crash
_SWEEP_S = 5.0  # from SIGKILL to giving up on processes that survive it
_CLOSE_S = 2 * _SWEEP_S  # until every running launch has ended, its sweep included
_POLL_S = 0.05  # how often a launch looks whether the engine was closed


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a rank under torchrun; written to `share.msgpack`."""

    program: str
    options: Mapping[str, str]
    share: Share
    started_s: float  # time.monotonic() of the controller


_SPECS = msgspec.msgpack.Decoder(LaunchSpec)


class TorchrunEngine:
    """Runs each job under its own torchrun, on one node, with the rank program `program`, a dotted module name."""

    def __init__(self, program: str, options: Mapping[str, str] | None = None) -> None:
        self._program = program
        self._options = dict(options or {})
        self._closing = threading.Event()
        self._ended = threading.Condition()
        self._running = 0  # jobs in `run`; guarded by `_ended`

    def close(self) -> None:
        """End all running jobs and wait until their processes are gone. They and later jobs end as `infra`."""
        self._closing.set()
        with self._ended:
            self._ended.wait_for(lambda: self._running == 0, _CLOSE_S)

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        """Run the one share of a job and return its outcome; by then all its processes have ended. Thread-safe.

        `report` gets nothing: no other node has ranks of the job.
        """
        assert share.is_whole, "torchrun has all ranks of a job"
        with self._ended:
            if self._closing.is_set():
                return ShareOutcome(infra="the engine is closed")
            self._running += 1
        try:
            return self._run(share)
        except OSError as error:
            return ShareOutcome(infra=f"could not start torchrun: {error}")
        finally:
            with self._ended:
                self._running -= 1
                self._ended.notify_all()

    def warm(self) -> None:
        """Do nothing: every job starts its own interpreters."""

    def end(self, job_id: str) -> None:
        """Do nothing, as `release`: no other node has ranks of the job."""

    def release(self, job_id: str) -> None: ...

    def _run(self, share: Share) -> ShareOutcome:
        started_s = time.monotonic()
        folder = JobFolder(Path(share.folder))
        folder.prepare()
        for rank in share.ranks:
            for kind in ("outcome", "pid", "phase"):
                rank_file(folder, rank, kind).unlink(missing_ok=True)
        spec = LaunchSpec(program=self._program, options=self._options, share=share, started_s=started_s)
        spec_file(folder).write_bytes(msgspec.msgpack.encode(spec))
        one_rank = module_command("harness.plugins.launchers.torchrun", [str(folder.path)])
        agents = str(folder.path / "agents")
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={agents}", "--rdzv-conf=store_type=file"]
        launch = ["--nnodes", "1", *meet, "--nproc-per-node", str(share.count), "--no-python", *one_rank]
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *launch]
        return _Launch(share, folder, started_s, self._closing).run(command)


def spec_file(folder: JobFolder) -> Path:
    return folder.path / "share.msgpack"


def rank_file(folder: JobFolder, rank: int, kind: Literal["outcome", "pid", "phase"]) -> Path:
    """Return a file that a rank writes: its encoded `RankOutcome`, its pid or its current phase."""
    return folder.path / f"rank{rank}.{kind}"


class _Launch:
    def __init__(self, share: Share, folder: JobFolder, started_s: float, closing: threading.Event) -> None:
        self._share = share
        self._folder = folder
        self._started_s = started_s
        self._closing = closing  # set when the engine was closed
        self._mark = uuid.uuid4().hex
        self._killed = False  # before torchrun had ended: its deadline has passed, or the engine was closed
        self._oom_kills = linux.oom_kills()

    def run(self, command: list[str]) -> ShareOutcome:
        log_path = self._folder.path / "torchrun.log"
        environ = {MARK: self._mark, "TMPDIR": str(self._folder.tmp), **_NO_TCP_STORE}
        with log_path.open("wb") as log:
            process = start(command, log, environ=environ)
        try:
            self._killed = not self._ended_in_time(process.pid)
            if self._killed and not self._closing.is_set():
                self._request_stacks()
                time.sleep(DUMP_S)
        finally:  # the ranks by their mark: each is in its own session, outside of the group of torchrun
            os.killpg(process.pid, signal.SIGKILL)
            linux.kill_marked(MARK, self._mark, _SWEEP_S)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if self._killed and self._closing.is_set():
            return ShareOutcome(infra="the engine was closed")
        return self._conclude(process.returncode, usage.ru_utime + usage.ru_stime, log_path)

    def _ended_in_time(self, pid: int) -> bool:
        """Wait until torchrun has ended; False where its deadline has passed, or the engine was closed."""
        until_s = self._started_s + self._share.job.deadline_s
        pidfd = linux.open_pidfd(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
                self._folder.bound_logs(self._share.ranks)
                if poll.poll(min(left_s, _POLL_S) * 1000):
                    return True
            return bool(poll.poll(0))
        finally:
            os.close(pidfd)

    def _request_stacks(self) -> None:
        """Ask the ranks for their stacks. A rank may be gone and its pid reused by another process: hence the mark."""
        for rank in self._share.ranks:
            if not rank_file(self._folder, rank, "outcome").exists():
                with suppress(OSError, ValueError):  # the rank has not started, or the file is still empty
                    pid = int(rank_file(self._folder, rank, "pid").read_text())
                    linux.signal_marked(pid, signal.SIGUSR1, MARK, self._mark)

    def _conclude(self, returncode: int, cpu_s: float, log_path: Path) -> ShareOutcome:
        now_s = time.monotonic() - self._started_s
        log = read_end(log_path, _LOG_BYTES)
        failed = _FAILED.search(log)
        codes = {int(failed["rank"]): int(failed["code"])} if failed else {}
        ranks = tuple(self._rank_outcome(rank, now_s, codes.get(rank)) for rank in self._share.ranks)
        cause = first_failure(ranks, on_gpus=bool(self._share.devices))
        got = _GOT_SIGNAL.search(log)
        returncode = -int(got["number"]) if got else returncode
        how = self._describe_exit(returncode)[1]
        infra = ""
        if cause and not self._killed and -returncode in MACHINE_SIGNALS:
            infra = f"torchrun was {how}"
        elif cause and not self._killed and cause.phase in ("", "preload") and cause.status != "raised":
            said = cause.log_tail or tail(log_path)
            infra = f"rank {cause.rank} did not start: {cause.message}; torchrun {how}\n{said}"
        return ShareOutcome(
            ranks=ranks,
            hung=self._killed,
            infra=infra,
            wall_s=now_s,
            cpu_s=cpu_s,
            detected_s=cause.seconds if cause else None,
        )

    def _describe_exit(self, returncode: int) -> tuple[RankStatus, str]:
        return describe_exit(returncode, returned=False, oom_kills=linux.oom_kills() - self._oom_kills)

    def _rank_outcome(self, rank: int, now_s: float, code: int | None) -> RankOutcome:
        """`code`: with which it exited, where torchrun says so."""
        path = rank_file(self._folder, rank, "outcome")
        if path.exists():
            return _OUTCOMES.decode(path.read_bytes())
        stacks = self._folder.dump_text(rank)
        status, message = self._guess(stacks) if code is None else self._describe_exit(code)
        return RankOutcome(
            rank=rank,
            status=status,
            message=message,
            traceback=stacks,
            phase=tail(rank_file(self._folder, rank, "phase")),
            seconds=now_s,
            log_tail=self._folder.log_tail(rank),
            signal=max(0, -(code or 0)),
        )

    def _guess(self, stacks: str) -> tuple[RankStatus, str]:
        """Return the status and message of a rank that wrote no outcome, and of which torchrun says nothing."""
        if stacks.startswith("Fatal Python error"):
            return "signaled", stacks.splitlines()[0]
        if self._killed:
            return "stuck", "did not finish"
        if stacks:
            return "stuck", "did not finish: torchrun killed it after another rank failed"
        return "exited", "exited without a result; its exit code is in torchrun.log"


def main(folder: JobFolder, rank: int) -> int:
    """Run this rank; returns the exit code: 0 when the program returned."""
    spec = _SPECS.decode(spec_file(folder).read_bytes())
    _redirect(folder, rank)
    rank_file(folder, rank, "pid").write_text(str(os.getpid()))  # from now on, SIGUSR1 dumps the stacks
    phases: list[str] = []

    def report_phase(phase: str) -> None:
        phases.append(phase)
        rank_file(folder, rank, "phase").write_text(phase)

    def rank_main(context: RankContext) -> bytes:
        context.report_phase("preload")  # here: an import error is then a failure of this rank
        program = preload_program(spec.program, spec.options)
        context.report_phase("start")
        return program.rank_main(context)

    report = run_program(rank_main, rank_context(spec.share, rank, report_phase))
    flush_streams()
    message, traceback = ("", "") if isinstance(report, Returned) else (report.message, report.traceback)
    outcome = RankOutcome(
        rank=rank,
        status="returned" if isinstance(report, Returned) else "raised",
        payload=report.payload if isinstance(report, Returned) else None,
        message=message,
        traceback=traceback,
        phase=phases[-1],
        seconds=report.at_s - spec.started_s,
        log_tail=folder.log_tail(rank),
    )
    path = rank_file(folder, rank, "outcome")
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.msgpack.encode(outcome))
    draft.rename(path)
    return 0 if isinstance(report, Returned) else 1


def _redirect(folder: JobFolder, rank: int) -> None:
    faulthandler.enable(file=(dump := folder.dump(rank).open("wb")))
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=dump, all_threads=True, chain=True)  # torchrun ends ranks with SIGTERM
    with folder.log(rank).open("ab") as log:  # appending, so that it can be cut
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main(JobFolder(Path(sys.argv[1])), int(os.environ["RANK"])))
