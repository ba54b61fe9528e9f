"""The controller's side of one zygote process: spawn it, submit shares of jobs, detect its death, shut it down.

Thread-safe. Restarts nothing: `zygote_engine.py` does.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.engine import linux
from harness.engine.folder import tail
from harness.engine.interpreter import MARK, child_environ, module_command
from harness.engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    End,
    Finished,
    FrameReader,
    FromZygote,
    Hello,
    Message,
    ProtocolError,
    Reached,
    Release,
    Share,
    ShareEvent,
    ShareOutcome,
    Submit,
    encode_frame,
)
from harness.engine.outcome import describe_exit

CLOSE_S = 6.0  # longer than the SHUTDOWN_S of the zygote


class ZygoteFailure(Exception):
    """The zygote did not start, died or was closed; the text says why and quotes its last output."""


class ZygoteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The rank program of a zygote, its options and its Python interpreter."""

    program: str
    options: Mapping[str, str]
    python: str


class _Pending(NamedTuple):
    """A running share: its job, the future of its outcome, and the callback for its events."""

    job_id: str
    outcome: Future[ShareOutcome]
    report: Callable[[ShareEvent], None]


class ZygoteClient:
    """Spawns the zygote on construction. Raises ZygoteFailure when the interpreter cannot be started."""

    def __init__(self, spec: ZygoteSpec) -> None:
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._tickets = 0
        self._pending: dict[int, _Pending] = {}
        self._close_reason = ""  # why `close` was called; empty before
        self._failure = ""  # why it no longer serves; empty while it does
        self._mark = uuid.uuid4().hex
        self._oom_kills = linux.oom_kills()
        self._reader: FrameReader[FromZygote] = FrameReader(FromZygote)
        self._listener: threading.Thread | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._socket, far = socket.socketpair()
        options = [f"{key}={value}" for key, value in sorted(spec.options.items())]
        arguments = ["--fd", str(far.fileno()), spec.program, *options]
        with far:
            try:
                self._process = subprocess.Popen(
                    module_command(spec.python, "harness.engine.zygote", arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=(far.fileno(),),
                    env=child_environ({MARK: self._mark}),
                    start_new_session=True,
                )
            except OSError as error:
                self._socket.close()
                self._output.close()
                raise ZygoteFailure(f"the zygote could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """Pid of the zygote."""
        return self._process.pid

    @property
    def serving(self) -> bool:
        """False after it has died or was closed."""
        return not (self._failure or self._close_reason)

    def wait_until_ready(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until the program is preloaded; returns its notes.

        After a ZygoteFailure, the caller must `close` this client.
        """
        try:
            hello = self._receive_hello(time.monotonic() + timeout_s)
        except TimeoutError:
            raise ZygoteFailure(self._describe(f"did not finish its preload within {timeout_s:g} s")) from None
        except (OSError, ProtocolError) as error:
            raise ZygoteFailure(self._describe(f"sent no valid hello: {error}")) from error
        if hello is None:
            raise ZygoteFailure(self._describe(f"did not start: {self._end_process()}"))
        if hello.version != PROTOCOL_VERSION:
            text = (
                f"speaks protocol {hello.version}, but this controller speaks {PROTOCOL_VERSION}: reinstall fp8-harness"
            )
            raise ZygoteFailure(self._describe(text))
        self._socket.settimeout(None)
        self._listener = threading.Thread(target=self._listen, name="fp8-harness-zygote", daemon=True)
        self._listener.start()
        return hello.notes

    def _receive_hello(self, until_s: float) -> Hello | None:
        while True:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            for message in self._reader.feed(data):
                if isinstance(message, Hello):
                    return message

    def submit(self, share: Share, report: Callable[[ShareEvent], None]) -> tuple[int, Future[ShareOutcome]]:
        """Submit a share; returns its ticket and the future of its outcome. Either raises ZygoteFailure if it died.

        `report` is called in a thread of this client, which waits for it.
        """
        future: Future[ShareOutcome] = Future()
        with self._lock:
            if self._failure:
                raise ZygoteFailure(self._failure)
            self._tickets += 1
            ticket = self._tickets
            self._pending[ticket] = _Pending(share.job.job_id, future, report)
        self._send(Submit(ticket=ticket, share=share))
        return ticket, future

    def cancel(self, ticket: int) -> None:
        """Kill a share and drop its future."""
        with self._lock:
            self._pending.pop(ticket, None)
        self._send(Cancel(ticket=ticket))

    def end(self, job_id: str) -> None:
        """End the share of this job, with the stacks of its ranks: one on another node has failed."""
        for ticket in self._tickets_of(job_id):
            self._send(End(ticket=ticket))

    def release(self, job_id: str) -> None:
        """Let the ranks of this job exit: those of other nodes have returned too."""
        for ticket in self._tickets_of(job_id):
            self._send(Release(ticket=ticket))

    def _tickets_of(self, job_id: str) -> tuple[int, ...]:
        with self._lock:
            return tuple(ticket for ticket, pending in self._pending.items() if pending.job_id == job_id)

    def _send(self, message: Message) -> None:
        with self._sending, suppress(OSError):  # the listener detects the same death and fails the share
            self._socket.sendall(encode_frame(message))

    def _listen(self) -> None:
        reason = ""
        try:
            while data := self._socket.recv(1 << 20):
                for message in self._reader.feed(data):
                    if isinstance(message, Finished):
                        self._deliver(message)
                    elif isinstance(message, Reached):
                        self._tell(message)
        except (OSError, ProtocolError) as error:
            reason = f"broke the connection: {error}"
        ended = self._end_process()
        self._fail_pending(self._describe(reason or f"died: {ended}"))

    def _deliver(self, message: Finished) -> None:
        with self._lock:
            pending = self._pending.pop(message.ticket, None)
        if pending is not None:
            pending.outcome.set_result(message.outcome)

    def _tell(self, message: Reached) -> None:
        with self._lock:
            pending = self._pending.get(message.ticket)
        if pending is not None:
            pending.report(message.event)

    def _fail_pending(self, reason: str) -> None:
        """Stop serving: all pending shares fail with the first reason given. Call when no process is left."""
        with self._lock:
            self._failure = self._failure or self._close_reason or reason
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.outcome.set_exception(ZygoteFailure(self._failure))

    def _end_process(self) -> str:
        """Wait for the zygote or kill it, and kill everything it started; returns how it ended."""
        try:
            returncode = self._process.wait(CLOSE_S)
            ended = describe_exit(returncode, returned=False, oom_kills=linux.oom_kills() - self._oom_kills)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            ended = f"did not exit within {CLOSE_S:g} s of losing its connection"
        linux.kill_marked(MARK, self._mark, CLOSE_S)  # ranks die with the zygote, but their children do not
        return ended

    def _describe(self, what: str) -> str:
        output = tail(Path(f"/proc/self/fd/{self._output.fileno()}")) if not self._output.closed else ""
        return f"the zygote {what}" + (f"\nits last output:\n{output}" if output else "")

    def close(self, reason: str) -> None:
        """Shut down the zygote and everything it started, and wait for that; pending shares fail with `reason`."""
        self._close_reason = self._close_reason or reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end_process()
        self._fail_pending(reason)
        if self._listener is not None:
            self._listener.join()
        self._socket.close()
        self._output.close()
