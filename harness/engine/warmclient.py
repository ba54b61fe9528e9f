"""One running warm process as its controller sees it: spawn, greet, hand over jobs, notice its death, end it.

Thread-safe. Does not restart anything: `zygote.py` decides that.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from harness.engine import linux
from harness.engine.ending import describe_exit
from harness.engine.folder import tail
from harness.engine.interpreter import MARK, child_environ, module_command
from harness.engine.wire import (
    WIRE_VERSION,
    Cancel,
    Finished,
    FrameReader,
    FromWarm,
    Hello,
    Job,
    JobOutcome,
    Message,
    Submit,
    WireError,
    encode_frame,
)

CLOSE_S = 6.0  # a warm process gives up on its ranks after 5 s


class WarmFailure(Exception):
    """The warm process did not start, has died or was closed; the text says why, with its last output."""


class WarmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run in the warm process, and with which interpreter."""

    program: str
    options: Mapping[str, str]
    python: str


class WarmClient:
    """Spawns the warm process at once. Raises WarmFailure when there is no such interpreter."""

    def __init__(self, spec: WarmSpec) -> None:
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._tickets = 0
        self._pending: dict[int, Future[JobOutcome]] = {}
        self._closing = ""  # why it is being closed
        self._death = ""  # why it serves no more; empty while it does
        self._mark = uuid.uuid4().hex
        self._oom_kills = linux.oom_kills()
        self._reader: FrameReader[FromWarm] = FrameReader(FromWarm)
        self._listener: threading.Thread | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs, gone when we are
        self._socket, far = socket.socketpair()
        options = [f"{key}={value}" for key, value in sorted(spec.options.items())]
        arguments = ["--fd", str(far.fileno()), spec.program, *options]
        with far:
            try:
                self._process = subprocess.Popen(
                    module_command(spec.python, "harness.engine.warm", arguments),
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
                raise WarmFailure(f"the warm process could not be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the warm process."""
        return self._process.pid

    @property
    def serving(self) -> bool:
        """False once it has died or was closed."""
        return not (self._death or self._closing)

    def greet(self, timeout_s: float) -> None:
        """Wait until the program is preloaded. Raises WarmFailure; the caller closes then."""
        try:
            hello = self._await_hello(time.monotonic() + timeout_s)
        except TimeoutError:
            raise WarmFailure(self._blame(f"did not finish its preload within {timeout_s:g} s")) from None
        except (OSError, WireError) as error:
            raise WarmFailure(self._blame(f"did not greet: {error}")) from error
        if hello is None:
            raise WarmFailure(self._blame(f"did not start: {self._end_process()}"))
        if hello.version != WIRE_VERSION:
            text = f"speaks wire version {hello.version}, this controller {WIRE_VERSION}: two versions of fp8-harness"
            raise WarmFailure(self._blame(text))
        self._socket.settimeout(None)
        self._listener = threading.Thread(target=self._listen, name="fp8-harness-warm", daemon=True)
        self._listener.start()

    def _await_hello(self, until_s: float) -> Hello | None:
        while True:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            for message in self._reader.feed(data):
                if isinstance(message, Hello):
                    return message

    def submit(self, job: Job) -> tuple[int, Future[JobOutcome]]:
        """Hand over a job; returns its ticket and its outcome to come. Both raise WarmFailure when it has died."""
        future: Future[JobOutcome] = Future()
        with self._lock:
            if self._death:
                raise WarmFailure(self._death)
            self._tickets += 1
            ticket = self._tickets
            self._pending[ticket] = future
        self._send(Submit(ticket=ticket, job=job))
        return ticket, future

    def cancel(self, ticket: int) -> None:
        """Kill a job and forget it."""
        with self._lock:
            self._pending.pop(ticket, None)
        self._send(Cancel(ticket=ticket))

    def _send(self, message: Message) -> None:
        with self._sending, suppress(OSError):  # the listener sees the same death and fails the job
            self._socket.sendall(encode_frame(message))

    def _listen(self) -> None:
        reason = ""
        try:
            while data := self._socket.recv(1 << 20):
                for message in self._reader.feed(data):
                    if isinstance(message, Finished):
                        self._deliver(message)
        except (OSError, WireError) as error:
            reason = f"broke the connection: {error}"
        ended = self._end_process()
        self._bury(self._blame(reason or f"died: {ended}"))

    def _deliver(self, message: Finished) -> None:
        with self._lock:
            future = self._pending.pop(message.ticket, None)
        if future is not None:
            future.set_result(message.outcome)

    def _bury(self, reason: str) -> None:
        """Serve no more; every job in hand fails with the reason that was first. Called when nothing is left."""
        with self._lock:
            self._death = self._death or self._closing or reason
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(WarmFailure(self._death))

    def _end_process(self) -> str:
        """Wait for it, or kill it, and end everything it started; returns how it ended."""
        try:
            returncode = self._process.wait(CLOSE_S)
            ended = describe_exit(returncode, returned=False, oom_kills=linux.oom_kills() - self._oom_kills)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            ended = "it lost its connection and did not leave"
        give_up_s = time.monotonic() + CLOSE_S
        while linux.kill_marked(MARK, self._mark) and time.monotonic() < give_up_s:
            time.sleep(0.005)  # ranks die with the warm process, but not what ranks have started
        return ended

    def _blame(self, what: str) -> str:
        output = tail(Path(f"/proc/self/fd/{self._output.fileno()}")) if not self._output.closed else ""
        return f"the warm process {what}" + (f"\nits last output:\n{output}" if output else "")

    def close(self, reason: str) -> None:
        """End it and everything it started; jobs in hand fail with `reason`. Returns when nothing is left."""
        self._closing = self._closing or reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end_process()
        self._bury(reason)
        if self._listener is not None:
            self._listener.join()
        self._socket.close()
        self._output.close()
