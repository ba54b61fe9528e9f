"""One rank as its supervisor sees it: fork it, hear it, ask for its stacks, end it, account for it.

Knows one process and what it said; which failure matters and when to end ranks is decided in `supervisor.py`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.engine import linux
from harness.engine.ending import Ending, describe_exit
from harness.engine.folder import JobFolder
from harness.engine.program import RankProgram
from harness.engine.rank import Seat, be_rank, flush_streams
from harness.engine.wire import FrameReader, FromRank, Job, PhaseReached, Raised, RankStatus, Returned, WireError

_CHUNK_BYTES = 1 << 20


class RankProcess:
    """A rank that was forked. `ending` is None until it reported or died; `alive` until it was reaped."""

    def __init__(self, job: Job, rank: int, *, started_s: float, selector: selectors.BaseSelector) -> None:
        self.rank = rank
        self.pid = 0
        self.alive = False
        self.cpu_s = 0.0
        self.ending: Ending | None = None
        self._folder = JobFolder(Path(job.folder))
        self._job = job
        self._started_s = started_s
        self._selector = selector
        self._phase = ""
        self._halted: RankStatus | None = None  # why it was asked for its stacks, once it was
        self._deaf = False  # nothing that it says counts any more
        self._condemned = False  # its death is our doing
        self._oom_kills = linux.oom_kills()
        self._reader: FrameReader[FromRank] = FrameReader(FromRank)

    def start(self, program: RankProgram, keep_fds: frozenset[int]) -> None:
        """Fork the rank. Raises OSError, leaving nothing behind, when the machine cannot."""
        with ExitStack() as opened:
            near, far = socket.socketpair()
            opened.callback(far.close)
            on_failure = opened.enter_context(ExitStack())
            on_failure.callback(near.close)
            log_fd = self._open(self._folder.log(self.rank), opened)
            dump_fd = self._open(self._folder.dump(self.rank), opened)
            flush_streams()  # else the rank would write our pending output again
            parent_pid = os.getpid()
            self.pid = os.fork()
            if self.pid == 0:
                seat = Seat(
                    job=self._job,
                    folder=self._folder,
                    rank=self.rank,
                    parent_pid=parent_pid,
                    socket=far,
                    log_fd=log_fd,
                    dump_fd=dump_fd,
                    keep_fds=keep_fds,
                )
                be_rank(program, seat)
            self._watch(near)
            on_failure.pop_all()

    @staticmethod
    def _open(path: Path, opened: ExitStack) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        opened.callback(os.close, fd)
        return fd

    def _watch(self, near: socket.socket) -> None:
        self._socket = near
        near.setblocking(False)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        self.alive = True
        self._selector.register(near, selectors.EVENT_READ, self._hear)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._reap)

    def _hear(self) -> None:
        """Take in everything that the rank has sent so far."""
        while self.alive:  # a callback of the same batch may have reaped it
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._selector.unregister(self._socket)
                return
            if not self._deaf:
                self._understand(data)

    def _understand(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except WireError as error:
            self._deaf = True
            if self.ending is None:
                self._end("raised", time.monotonic(), message=f"sent unreadable data to its supervisor: {error}")

    def _take(self, message: FromRank) -> None:
        if isinstance(message, PhaseReached):
            self._phase = message.phase
        elif isinstance(message, Returned):
            self._end("returned", message.at_s, payload=message.payload)
        elif isinstance(message, Raised):
            self._end("raised", message.at_s, message=message.message, traceback=message.traceback)

    def _end(
        self, status: RankStatus, at_s: float, *, payload: bytes | None = None, message: str = "", traceback: str = ""
    ) -> None:
        self.ending = Ending(
            rank=self.rank,
            status=status,
            at_s=at_s - self._started_s,
            payload=payload,
            message=message,
            traceback=traceback,
            phase=self._phase,
            log_tail=self._folder.log_tail(self.rank),
        )

    def _reap(self) -> None:
        """The process has ended: hear its last words, end its group, collect its exit status and CPU time."""
        if self._socket in self._selector.get_map():
            self._hear()
        self._kill_group()  # before reaping: until then its pid cannot belong to anyone else
        _, status, usage = os.wait4(self.pid, 0)
        self.alive = False
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.forget()
        returned = self.ending is not None and self.ending.status == "returned"
        returncode = os.waitstatus_to_exitcode(status)
        if self._deaf or self._condemned or (self.ending and not returned) or (returned and returncode == 0):
            return
        grown = linux.oom_kills() - self._oom_kills
        kind, message = describe_exit(returncode, returned=returned, oom_kills=grown)
        self._end(kind, time.monotonic(), message=message, traceback=self._folder.dump_text(self.rank))

    def forget(self) -> None:
        """Stop watching: it was reaped, or nothing can end it."""
        for source in (self._socket, self._pidfd):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self._socket.close()
        os.close(self._pidfd)

    def release(self) -> None:
        """Let a rank that has reported leave. Reaches it even where a child of it holds a copy of its socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def halt(self, *, final: bool) -> None:
        """Ask a rank that has not reported for the stacks of all its threads; `final`: it can no longer report."""
        if not self.alive or self.ending is not None:
            return
        self._deaf = final
        self._halted = "stopped" if linux.state(self.pid) in ("T", "t") else "stuck"
        self._signal(signal.SIGUSR1)
        if self._halted == "stopped":
            self._signal(signal.SIGCONT)  # a stopped process handles no signal, so it could not dump

    def kill(self) -> None:
        """SIGKILL the rank and its group. A rank that has not reported ends as what it was halted for."""
        if not self.alive:
            return
        if self.ending is None:
            self._end_as_halted()
        self._condemned = True
        self._signal(signal.SIGKILL)
        self._kill_group()

    def _end_as_halted(self) -> None:
        status = self._halted or "stuck"
        message = "stopped by a signal (SIGSTOP or a debugger)" if status == "stopped" else "did not finish"
        stacks = self._folder.dump_text(self.rank)
        self._end(status, time.monotonic(), message=message, traceback=stacks)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no group: it was killed before it made its own
            os.killpg(self.pid, signal.SIGKILL)
