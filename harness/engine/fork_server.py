"""The fork server: imports and warms up a rank program once, then forks fresh ranks for every share of a job.

`python -m harness.engine.fork_server --fd N PROGRAM [KEY=VALUE ...]`; `fork_server_engine.py` passes it one end of a
socket. One thread, one selector loop, several shares at a time. When the controller exits, it kills every rank and
exits too.
"""

import fcntl
import gc
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence

from harness.engine import linux, messages
from harness.engine.program import RankMain, preloaded
from harness.engine.supervisor import Supervisor

SHUTDOWN_S = 5.0  # from losing the controller to giving up on ranks that survive SIGKILL


class ForkServer:
    """Serves one controller until it disconnects."""

    def __init__(self, control: socket.socket, controller_pid: int, rank_main: RankMain) -> None:
        self._keep_fds = linux.open_fds() - {control.fileno()}  # opened by the program, so ranks inherit them
        self._control = control
        self._rank_main = rank_main
        self._reader: messages.FrameReader[messages.ToForkServer] = messages.FrameReader(messages.ToForkServer)
        self._shares: dict[int, Supervisor] = {}
        self._connected = True
        self._end_reason = ""  # why it ends; empty while it serves
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._receive)
        # A child of the controller may hold a copy of its socket and hide its death, so watch the process too.
        self._controller = linux.open_pidfd(controller_pid)
        self._selector.register(self._controller, selectors.EVENT_READ, self._disconnect)

    def serve(self, notes: tuple[str, ...]) -> str:
        """Run shares until the controller closes its end, dies or sends what is no message; then kill all ranks.

        Returns what the controller did wrong; empty when it has just left.
        """
        self._send(messages.Hello(notes=notes))
        while not self._end_reason:
            self._poll()
        reason, left = self._end_reason, not self._connected
        for supervisor in self._shares.values():
            supervisor.abort(reason)
        give_up_s = time.monotonic() + SHUTDOWN_S
        while self._shares and time.monotonic() < give_up_s:
            self._poll()
        while linux.kill_orphans(frozenset())[0] and time.monotonic() < give_up_s:
            time.sleep(0.005)
        return "" if left else reason

    def _poll(self) -> None:
        wakeups = [supervisor.wakeup_s for supervisor in self._shares.values()]
        timeout_s = max(0.0, min(wakeups) - time.monotonic()) if wakeups else None
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        for ticket, supervisor in list(self._shares.items()):
            supervisor.tick(now_s)
            if supervisor.outcome is not None:
                del self._shares[ticket]
                self._send(messages.Finished(ticket=ticket, outcome=supervisor.outcome))

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._disconnect()
            return
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except messages.ProtocolError as error:
            self._end(f"the controller sent unreadable data: {error}")

    def _handle(self, message: messages.ToForkServer) -> None:
        if isinstance(message, messages.Submit):
            self._start(message)
            return
        supervisor = self._shares.get(message.ticket)
        if supervisor is None:
            return  # it has ended
        if message.what == "release":
            supervisor.release()
        elif message.what == "end":
            supervisor.end()
        else:
            supervisor.abort("cancelled")

    def _start(self, message: messages.Submit) -> None:
        def live_pids() -> frozenset[int]:
            return frozenset(pid for supervisor in self._shares.values() for pid in supervisor.pids)

        def report(event: messages.ShareEvent) -> None:
            self._send(messages.Reached(ticket=message.ticket, event=event))

        supervisor = Supervisor(message.share, self._rank_main, self._selector, live_pids, report)
        self._shares[message.ticket] = supervisor
        supervisor.start(self._keep_fds)

    def _disconnect(self) -> None:
        self._connected = False
        self._end("the controller is gone")

    def _end(self, reason: str) -> None:
        """Read nothing any more; the first reason counts."""
        if not self._end_reason:
            self._end_reason = reason
            self._selector.unregister(self._control)
            self._selector.unregister(self._controller)

    def _send(self, message: messages.Message) -> None:
        if self._connected:
            try:
                self._control.sendall(messages.encode_frame(message))
            except OSError:
                self._disconnect()


def _die_on_hangup(control: socket.socket, *, armed: bool) -> None:
    """While armed, losing the controller terminates this process at once, even in the middle of a long import.

    The controller sends nothing before Hello, so the only event on the socket is its end; SIGIO then terminates.
    """
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if armed else flags & ~os.O_ASYNC)
    if armed and select.select([control], [], [], 0)[0]:
        sys.exit("the controller exited before the fork server had started")


def main(arguments: Sequence[str]) -> None:
    """Preload the program, send Hello, serve.

    Unreadable data from the controller ends it with one line on stderr and exit code 1.
    """
    _, fd, name, *options = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the controller
    controller_pid = os.getppid()
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    _die_on_hangup(control, armed=True)
    linux.become_subreaper()
    rank_main, notes = preloaded(name, dict(option.split("=", 1) for option in options))
    gc.collect()
    gc.freeze()  # ranks share these pages, and a collection in a rank would copy them all
    _die_on_hangup(control, armed=False)
    error = ForkServer(control, controller_pid, rank_main).serve(notes)
    if error:
        sys.exit(f"fp8-harness fork server: {error}. Fix: run the same version of fp8-harness on both sides.")


if __name__ == "__main__":
    main(sys.argv[1:])
