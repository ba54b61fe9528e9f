"""One rank process, from inside and as its supervisor handles it.

Inside, it sets up the process, runs the program, reports the result, waits for release and exits, and never returns to
the code of the fork server that forked it. Outside, it is forked, its messages are read, its stacks dumped, it is
killed and reaped; `supervisor.py` decides which failure matters and when to end ranks.
"""

import faulthandler
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from harness.engine import linux, messages
from harness.engine.outcome import describe_exit
from harness.engine.processes import JobFolder
from harness.engine.program import RankContext, RankMain, rank_context

MESSAGE_CHARS = 4000
TRACEBACK_CHARS = 65536
LOST_EXIT_CODE = 70  # the rank could not report its result


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank gets from its supervisor. `keep_fds` were open before the engine opened any."""

    share: messages.Share
    rank: int
    parent_pid: int
    socket: socket.socket
    log_fd: int
    dump_fd: int
    keep_fds: frozenset[int]


def run_rank(rank_main: RankMain, setup: RankSetup) -> NoReturn:
    """Run this rank to the end of the process. Call right after the fork."""
    code = LOST_EXIT_CODE
    try:
        _prepare_process(setup)
        lock = threading.Lock()

        def report_phase(phase: str) -> None:
            with lock:
                setup.socket.sendall(messages.encode_frame(messages.PhaseReached(phase=phase)))

        report = run_program(rank_main, rank_context(setup.share, setup.rank, report_phase))
        flush_streams()
        setup.socket.sendall(messages.encode_frame(report))
        setup.socket.recv(1)  # keep all resources until the supervisor releases every rank
        code = 0
    except BaseException:
        traceback.print_exc()  # to the log of the rank; exceptions of the program were reported above
        flush_streams()
    finally:
        os._exit(code)


def _prepare_process(setup: RankSetup) -> None:
    os.setsid()
    linux.die_with_parent(setup.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the controller
    os.dup2(setup.log_fd, 1)
    os.dup2(setup.log_fd, 2)
    own = {0, 1, 2, setup.socket.fileno(), setup.dump_fd}
    for fd in linux.open_fds() - setup.keep_fds - own:
        os.close(fd)  # inherited from the engine: a copy would keep the sockets of other ranks open
    faulthandler.enable(file=setup.dump_fd)
    faulthandler.register(signal.SIGUSR1, file=setup.dump_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a killed rank loses no output
    os.environ["TMPDIR"] = str(JobFolder(Path(setup.share.folder)).tmp)
    tempfile.tempdir = None


def run_program(rank_main: RankMain, context: RankContext) -> messages.Returned | messages.Raised:
    """Return the result of `rank_main`, or the exception that it raised. SystemExit counts as a failure too."""
    try:
        payload = rank_main(context)
        if not isinstance(payload, bytes):
            raise TypeError(f"rank_main returned {type(payload).__name__}, not bytes")
    except BaseException as error:
        at_s = time.monotonic()
        text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
        return messages.Raised(at_s=at_s, message=one_line(error), traceback=text)
    return messages.Returned(at_s=time.monotonic(), payload=payload)


def one_line(error: BaseException) -> str:
    """Return the type and text of an exception on one line, at most 4000 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception whose __str__ raises
        text = f"<str() raised {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS] if text else type(error).__name__


def flush_streams() -> None:
    """Flush stdout and stderr. Errors are ignored: a full disk must not hide the result of the program."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


_CHUNK_BYTES = 1 << 20


class RankProcess:
    """A forked rank. `outcome` is None until it has reported or died; `alive` is True until it is reaped."""

    def __init__(self, share: messages.Share, rank: int, *, started_s: float, selector: selectors.BaseSelector) -> None:
        self.rank = rank
        self.pid = 0
        self.alive = False
        self.cpu_s = 0.0
        self.outcome: messages.RankOutcome | None = None
        self._folder = JobFolder(Path(share.folder))
        self._share = share
        self._started_s = started_s
        self._selector = selector
        self._phase = ""
        self._hang_status: messages.RankStatus | None = None  # "stuck" or "stopped", once its stacks were requested
        self._muted = False  # ignore whatever it still sends
        self._killed = False  # by this class, so its death is not a failure
        self._oom_kills = linux.oom_kills()
        self._reader: messages.FrameReader[messages.FromRank] = messages.FrameReader(messages.FromRank)

    def start(self, rank_main: RankMain, keep_fds: frozenset[int]) -> None:
        """Fork the rank. Raises OSError, without leaking a process or a file, when the system refuses."""
        with ExitStack() as opened:
            near, far = socket.socketpair()
            opened.callback(far.close)
            on_failure = opened.enter_context(ExitStack())
            on_failure.callback(near.close)
            log_fd = self._open(self._folder.log(self.rank), opened)
            dump_fd = self._open(self._folder.dump(self.rank), opened)
            flush_streams()  # or the rank would print our buffered output again
            parent_pid = os.getpid()
            self.pid = os.fork()
            if self.pid == 0:
                setup = RankSetup(
                    share=self._share,
                    rank=self.rank,
                    parent_pid=parent_pid,
                    socket=far,
                    log_fd=log_fd,
                    dump_fd=dump_fd,
                    keep_fds=keep_fds,
                )
                run_rank(rank_main, setup)
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
            self._pidfd = linux.open_pidfd(self.pid)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        self.alive = True
        self._selector.register(near, selectors.EVENT_READ, self._receive)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._reap)

    def _receive(self) -> None:
        while self.alive:  # another callback of the same poll may have reaped it
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._selector.unregister(self._socket)
                return
            if not self._muted:
                self._decode(data)

    def _decode(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except messages.ProtocolError as error:
            self._muted = True
            if self.outcome is None:
                self._finish("raised", time.monotonic(), message=f"sent unreadable data to its supervisor: {error}")

    def _handle(self, message: messages.FromRank) -> None:
        if isinstance(message, messages.PhaseReached):
            self._phase = message.phase
        elif isinstance(message, messages.Returned):
            self._finish("returned", message.at_s, payload=message.payload)
        elif isinstance(message, messages.Raised):
            self._finish("raised", message.at_s, message=message.message, traceback=message.traceback)

    def _finish(
        self,
        status: messages.RankStatus,
        at_s: float,
        *,
        payload: bytes | None = None,
        message: str = "",
        traceback: str = "",
        signal_number: int = 0,
    ) -> None:
        self.outcome = messages.RankOutcome(
            rank=self.rank,
            status=status,
            payload=payload,
            message=message,
            traceback=traceback,
            phase=self._phase,
            seconds=at_s - self._started_s,
            log_tail=self._folder.log_tail(self.rank),
            signal=signal_number,
        )

    def _reap(self) -> None:
        """The process has exited: read its last messages, kill its group, collect its exit status and CPU time."""
        if self._socket in self._selector.get_map():
            self._receive()
        self._kill_group()  # before reaping, after which its pid may be reused
        _, status, usage = os.wait4(self.pid, 0)
        self.alive = False
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.unwatch()
        returned = self.outcome is not None and self.outcome.status == "returned"
        returncode = os.waitstatus_to_exitcode(status)
        if self._muted or self._killed or (self.outcome and not returned) or (returned and returncode == 0):
            return
        grown = linux.oom_kills() - self._oom_kills
        kind, message = describe_exit(returncode, returned=returned, oom_kills=grown)
        stacks = self._folder.dump_text(self.rank)
        self._finish(kind, time.monotonic(), message=message, traceback=stacks, signal_number=max(0, -returncode))

    def unwatch(self) -> None:
        """Stop watching the process: it was reaped, or nothing can kill it."""
        for source in (self._socket, self._pidfd):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self._socket.close()
        os.close(self._pidfd)

    def release(self) -> None:
        """Let a rank that has reported exit. Works even if a child of it holds a copy of its socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def request_stacks(self, *, final: bool) -> None:
        """Have a rank that has not reported dump the stacks of all its threads. `final`: ignore what it sends later."""
        if not self.alive or self.outcome is not None:
            return
        self._muted = final
        self._hang_status = "stopped" if linux.state(self.pid) in ("T", "t") else "stuck"
        self._signal(signal.SIGUSR1)
        if self._hang_status == "stopped":
            self._signal(signal.SIGCONT)  # a stopped process would not handle SIGUSR1

    def kill(self) -> None:
        """SIGKILL the rank and its group. A rank that has not reported ends as stuck or stopped."""
        if not self.alive:
            return
        if self.outcome is None:
            status = self._hang_status or "stuck"
            message = "stopped by a signal (SIGSTOP or a debugger)" if status == "stopped" else "did not finish"
            stacks = self._folder.dump_text(self.rank)
            self._finish(status, time.monotonic(), message=message, traceback=stacks)
        self._killed = True
        self._signal(signal.SIGKILL)
        self._kill_group()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            linux.signal_pidfd(self._pidfd, number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # killed before it had created its group
            os.killpg(self.pid, signal.SIGKILL)
