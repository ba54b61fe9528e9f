"""The fork server engine: runs shares of jobs on ranks forked from one fork server, and replaces that process when it
dies.

Neither imports the rank program nor forks, so any thread may call it.
"""

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
from typing import Literal, NamedTuple, Self

from harness.engine import linux, messages
from harness.engine.outcome import describe_exit
from harness.engine.processes import MARK, module_command, start, tail

CLOSE_S = 6.0  # longer than the SHUTDOWN_S of the fork server


class ForkServerFailure(Exception):
    """The fork server did not start, died or was closed; the text says why and quotes its last output."""


class ForkServerLost(ForkServerFailure):
    """The fork server died or fell silent with shares on it. `out_of_memory`: the OOM killer has run since."""

    def __init__(self, reason: str, *, out_of_memory: bool) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class StartLimits(NamedTuple):
    """How long a fork server may take to import and warm up its program, in seconds from its start.

    10 to 60 s with torch on a busy machine; more where Python reads from a slow network.
    """

    told_s: float = 60.0  # then a note says who waits for what
    stopped_s: float = 120.0  # then one that is stopped by a signal is given up
    given_up_s: float = 600.0


class _Pending(NamedTuple):
    """A running share: its job, the future of its outcome, and the callback for its events."""

    job_id: str
    outcome: Future[messages.ShareOutcome]
    report: Callable[[messages.ShareEvent], None]


class ForkServerClient:
    """The controller's side of one fork server process, which it starts on construction. Thread-safe.

    Raises Fork serverFailure when the interpreter cannot be started.
    """

    def __init__(self, program: str, options: Mapping[str, str]) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._tickets = 0
        self._pending: dict[int, _Pending] = {}
        self._close_reason = ""  # why `close` was called; empty before
        self._failure = ""  # why it no longer serves; empty while it does
        self._mark = uuid.uuid4().hex
        self._oom_kills = linux.oom_kills()
        self._reader: messages.FrameReader[messages.FromForkServer] = messages.FrameReader(messages.FromForkServer)
        self._listener: threading.Thread | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._socket, far = socket.socketpair()
        given = [f"{key}={value}" for key, value in sorted(options.items())]
        command = module_command("harness.engine.fork_server", ["--fd", str(far.fileno()), program, *given])
        with far:
            try:
                self._process = start(command, self._output, environ={MARK: self._mark}, fds=[far.fileno()])
            except OSError as error:
                self._socket.close()
                self._output.close()
                raise ForkServerFailure(f"the fork server could not be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def serving(self) -> bool:
        return not (self._failure or self._close_reason)

    def wait_until_ready(self, limits: StartLimits, note: Callable[[str], None]) -> tuple[str, ...]:
        """Wait until the program is preloaded; returns its notes. `note` gets a line where that takes long.

        After a Fork serverFailure, the caller must `close` this client.
        """
        began_s = time.monotonic()
        try:
            hello = self._receive_hello_within(began_s, limits, note)
        except TimeoutError:
            waited = f"did not finish its preload within {time.monotonic() - began_s:.0f} s"
            raise ForkServerFailure(self._describe(f"{waited}: {self._progress}")) from None
        except (OSError, messages.ProtocolError) as error:
            raise ForkServerFailure(self._describe(f"sent no valid hello: {error}")) from error
        if hello is None:
            raise ForkServerFailure(self._describe(f"did not start: {self._end_process()}"))
        self._socket.settimeout(None)
        self._listener = threading.Thread(target=self._listen, name="fp8-harness-fork server", daemon=True)
        self._listener.start()
        return hello.notes

    def _receive_hello_within(
        self, began_s: float, limits: StartLimits, note: Callable[[str], None]
    ) -> messages.Hello | None:
        with suppress(TimeoutError):
            return self._receive_hello(began_s + limits.told_s)
        note(
            f"ranks wait for the fork server, process {self.pid}, which has not imported {self._program} after "
            f"{limits.told_s:g} s: {self._progress}."
        )
        try:
            return self._receive_hello(began_s + limits.stopped_s)
        except TimeoutError:
            if self._stopped:
                raise
        return self._receive_hello(began_s + limits.given_up_s)

    @property
    def _stopped(self) -> bool:
        return linux.state(self.pid) in ("T", "t")

    @property
    def _progress(self) -> str:
        """Return what a fork server that does not start was doing, and what to look at."""
        if self._stopped:
            return f"it is stopped by a signal, and `kill -CONT {self.pid}` continues it"
        return f"it still runs, and `py-spy dump --pid {self.pid}` shows where it is"

    def _receive_hello(self, until_s: float) -> messages.Hello | None:
        while True:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            for message in self._reader.feed(data):
                if isinstance(message, messages.Hello):
                    return message

    def submit(
        self, share: messages.Share, report: Callable[[messages.ShareEvent], None]
    ) -> tuple[int, Future[messages.ShareOutcome]]:
        """Submit a share; returns its ticket and the future of its outcome. Either raises ForkServerLost if it died.

        `report` is called in a thread of this client, which waits for it.
        """
        future: Future[messages.ShareOutcome] = Future()
        with self._lock:
            if self._failure:
                raise self._loss(self._failure)
            self._tickets += 1
            ticket = self._tickets
            self._pending[ticket] = _Pending(share.job.job_id, future, report)
        self._send(messages.Submit(ticket=ticket, share=share))
        return ticket, future

    def cancel(self, ticket: int) -> None:
        with self._lock:
            self._pending.pop(ticket, None)
        self._send(messages.Control(ticket=ticket, what="cancel"))

    def control(self, job_id: str, what: Literal["end", "release"]) -> None:
        """End the share of this job, or release its ranks: see `Control`."""
        with self._lock:
            tickets = [ticket for ticket, pending in self._pending.items() if pending.job_id == job_id]
        for ticket in tickets:
            self._send(messages.Control(ticket=ticket, what=what))

    def _send(self, message: messages.Message) -> None:
        with self._sending, suppress(OSError):  # the listener detects the same death and fails the share
            self._socket.sendall(messages.encode_frame(message))

    def _listen(self) -> None:
        reason = ""
        try:
            while data := self._socket.recv(1 << 20):
                for message in self._reader.feed(data):
                    self._hand_on(message)
        except (OSError, messages.ProtocolError) as error:
            reason = f"broke the connection: {error}"
        ended = self._end_process()
        self._fail_pending(self._describe(reason or f"died: {ended}"))

    def _hand_on(self, message: messages.FromForkServer) -> None:
        if isinstance(message, messages.Hello):
            return
        take = self._pending.pop if isinstance(message, messages.Finished) else self._pending.get
        with self._lock:
            pending = take(message.ticket, None)
        if pending is not None and isinstance(message, messages.Finished):
            pending.outcome.set_result(message.outcome)
        elif pending is not None and isinstance(message, messages.Reached):
            pending.report(message.event)

    def _fail_pending(self, reason: str) -> None:
        """Stop serving: all pending shares fail with the first reason given. Call when no process is left."""
        with self._lock:
            self._failure = self._failure or self._close_reason or reason
            pending, self._pending = self._pending, {}
        for pending_share in pending.values():
            pending_share.outcome.set_exception(self._loss(self._failure))

    def _loss(self, reason: str) -> ForkServerLost:
        return ForkServerLost(reason, out_of_memory=linux.oom_kills() > self._oom_kills)

    def give_up(self, reason: str) -> ForkServerLost:
        """Close this client, which does not answer; returns the loss for the share that noticed."""
        self.close(reason)
        return self._loss(reason)

    def _end_process(self) -> str:
        """Wait for the fork server or kill it, and kill everything it started; returns how it ended."""
        if self._stopped:
            self._process.kill()  # it would not notice that its connection is closed
        try:
            returncode = self._process.wait(CLOSE_S)
            ended = describe_exit(returncode, returned=False, oom_kills=linux.oom_kills() - self._oom_kills)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            ended = f"did not exit within {CLOSE_S:g} s of losing its connection"
        linux.kill_marked(MARK, self._mark, CLOSE_S)  # ranks die with the fork server, but their children do not
        return ended

    def _describe(self, failure: str) -> str:
        output = tail(Path(f"/proc/self/fd/{self._output.fileno()}")) if not self._output.closed else ""
        return f"the fork server {failure}" + (f"\nits last output:\n{output}" if output else "")

    def close(self, reason: str) -> None:
        """Shut down the fork server and everything it started, and wait for that; pending shares fail with `reason`."""
        self._close_reason = self._close_reason or reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end_process()
        self._fail_pending(reason)
        if self._listener is not None:
            self._listener.join()
        self._socket.close()
        self._output.close()


START_ATTEMPTS = 2  # a program that failed to preload twice in a row will fail again
REPLY_MARGIN_S = 60.0  # after the deadline of a job; stacks, kill and sweep take at most 41 s


class ForkServerEngine:
    """Runs shares of jobs of the rank program `program`, a dotted module name, preloaded with `options`.

    The first share starts the fork server, and `note` gets the program's remarks about its environment, in any thread,
    and those about a start that takes longer than `limits` allow. Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        program: str,
        options: Mapping[str, str] | None = None,
        note: Callable[[str], None] = lambda _: None,
        limits: StartLimits | None = None,
    ) -> None:
        self._note = note
        self._limits = limits or StartLimits()
        self._given = program, dict(options or {})
        self._starting = threading.Lock()
        self._client: ForkServerClient | None = None
        self._closed = False
        self._submitting = threading.Lock()
        self._ended: dict[str, bool] = {}  # by id of a job that runs: whether its share must end
        self._failed_starts = 0
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, share: messages.Share, report: Callable[[messages.ShareEvent], None]) -> messages.ShareOutcome:
        """Run one share and return its outcome; by then all its processes have ended. Callable from any thread.

        Of a share that is not the whole job, `report` is called in another thread when all its ranks have returned
        (they wait for `release`) and when the first has failed. Failures are part of the outcome, never raised.
        KeyboardInterrupt kills the share.
        """
        assert not share.devices or len(share.devices) == share.count, "one device per rank, or none"
        assert share.count > 0, "a share has ranks"
        assert share.job.deadline_s > 0, "deadline_s must be positive"
        self._ended[share.job.job_id] = False
        try:
            return self._run_on(self._ready_client(), share, report)
        except ForkServerLost as loss:
            return messages.ShareOutcome(
                infra=str(loss), fork_server_lost=not self._closed, out_of_memory=loss.out_of_memory
            )
        except ForkServerFailure as failure:
            return messages.ShareOutcome(infra=str(failure))
        finally:
            del self._ended[share.job.job_id]

    def warm(self) -> None:
        """Start the fork server if needed, and wait until it can fork. `run` reports why it cannot."""
        with suppress(ForkServerFailure):
            self._ready_client()

    def end(self, job_id: str) -> None:
        with self._submitting:
            if job_id in self._ended:
                self._ended[job_id] = True
            if self._client is not None:
                self._client.control(job_id, "end")

    def release(self, job_id: str) -> None:
        if self._client is not None:
            self._client.control(job_id, "release")

    def _run_on(
        self, client: ForkServerClient, share: messages.Share, report: Callable[[messages.ShareEvent], None]
    ) -> messages.ShareOutcome:
        job = share.job
        with self._submitting:
            if self._ended[job.job_id]:
                return messages.ShareOutcome()  # before any of its ranks was started
            ticket, future = client.submit(share, report)
        try:
            return future.result(job.deadline_s + REPLY_MARGIN_S)
        except ForkServerFailure:
            raise
        except TimeoutError:
            reason = f"the fork server sent no outcome within {REPLY_MARGIN_S:g} s of the deadline of {job.job_id}"
            raise client.give_up(reason) from None
        except BaseException:
            client.cancel(ticket)
            raise

    def _ready_client(self) -> ForkServerClient:
        with self._starting:
            if self._closed:
                raise ForkServerFailure("the engine is closed")
            if self._client is not None and self._client.serving:
                return self._client
            if self._client is not None:
                self._client.close("the fork server had died")  # ends whatever outlived it
            if self._failed_starts >= START_ATTEMPTS:
                raise ForkServerFailure(self._failure)
            self._client = ForkServerClient(*self._given)
            self._wait_until_ready(self._client)
            return self._client

    def _wait_until_ready(self, client: ForkServerClient) -> None:
        try:
            if self._closed:  # closed between the check above and the spawn
                raise ForkServerFailure("the engine is closed")
            notes = client.wait_until_ready(self._limits, self._note)
        except ForkServerFailure as failure:
            self._failed_starts += 1
            self._failure = str(failure)
            client.close(self._failure)
            raise
        except BaseException:
            client.close("interrupted while the fork server started")
            raise
        self._failed_starts = 0
        for text in notes:
            self._note(text)

    def close(self) -> None:
        """Shut down the fork server and all ranks. Pending and later shares end as `infra`."""
        self._closed = True
        client = self._client  # without the lock: another thread may be waiting for the preload
        if client is not None:
            client.close("the engine was closed")
