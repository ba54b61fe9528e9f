"""Nodes over TCP: other machines that started the same command, as the controller of a run uses them.

The controller listens and a node connects, so one address is enough. What a node records, traces of its ranks
included, comes over the same connection: no folder is shared, and no clock, for a node counts seconds from the start of
its share.
A connection that ends without `Bye` is a lost node to one side and a lost controller to the other.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

from harness.engine.capacity import NodeCapacity
from harness.engine.messages import FrameReader, Message, ProtocolError, Share, ShareEvent, ShareOutcome, encode_frame
from harness.engine.node import NodeLost, Reservation

NODE_PROTOCOL_VERSION = 1
_SILENT_S = 30  # from the last answer of a machine, to its packets too, to its loss


class Join(Message, frozen=True, tag="join"):
    """Node to controller, the first message. `facts` must be equal on all nodes, such as the versions of packages."""

    version: int
    node_rank: int
    nnodes: int
    capacity: NodeCapacity
    facts: Mapping[str, str]


class Refused(Message, frozen=True, tag="refused"):
    """Controller to node: it cannot take part."""

    reason: str
    fix: str


class Asked(Message, frozen=True, tag="asked"):
    """Controller to node: a call of a method of `Node`. Only the first three are answered."""

    number: int
    method: Literal["reserve", "warm", "run", "end", "release", "free", "close"]
    job_id: str = ""
    count: int = 0
    preload: Mapping[str, str] = {}
    share: Share | None = None


class Bye(Message, frozen=True, tag="bye"):
    """Controller to node: the run is over, with this exit code."""

    code: int


class Answered(Message, frozen=True, tag="answered"):
    """Node to controller: what a call returned, or the text of its OSError or HarnessError."""

    number: int
    reservation: Reservation | None = None
    outcome: ShareOutcome | None = None
    error: str = ""


class Reported(Message, frozen=True, tag="reported"):
    """Node to controller: what `run` reports while it runs."""

    number: int
    event: ShareEvent


ToNode = Refused | Asked | Bye
FromNode = Join | Answered | Reported


def node_name(node_rank: int, host: str) -> str:
    """What a node is called; nodes are in this order, so that rank 0 is on node 0."""
    return f"node {node_rank} ({host})"


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end this connection when the other machine is gone: it may close nothing."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", _SILENT_S // 5 - 2)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RemoteNode:
    """A node behind a connection. Methods raise NodeLost when that has ended."""

    def __init__(self, connection: socket.socket, joined: Join, reader: FrameReader[FromNode]) -> None:
        self.name = node_name(joined.node_rank, joined.capacity.host)
        self.capacity = joined.capacity
        self._connection = connection
        self._reader = reader
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._pending: dict[int, tuple[Future[Answered], Callable[[ShareEvent], None]]] = {}
        self._lost = ""
        threading.Thread(target=self._listen, name=f"fp8-harness-{self.name}", daemon=True).start()

    def reserve(self, job_id: str, count: int) -> Reservation:
        """Hold slots and a folder there. Raises OSError if the node cannot."""
        answer = self._ask("reserve", job_id=job_id, count=count)
        if answer.reservation is None:
            raise OSError(f"{self.name}: {answer.error}")
        return answer.reservation

    def warm(self, preload: Mapping[str, str]) -> None:
        """Warm up that node for ranks with these options."""
        self._ask("warm", preload=preload)

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        """Run a share there to its end."""
        answer = self._ask("run", share=share, report=report)
        return answer.outcome or ShareOutcome(infra=f"{self.name}: {answer.error}")

    def end(self, job_id: str) -> None:
        """End the share of this job at once."""
        self._tell(Asked(number=0, method="end", job_id=job_id))

    def release(self, job_id: str) -> None:
        """Let the ranks of this job exit."""
        self._tell(Asked(number=0, method="release", job_id=job_id))

    def free(self, job_id: str) -> None:
        """Give back what a job holds there."""
        self._tell(Asked(number=0, method="free", job_id=job_id))

    def close(self) -> None:
        """Have the node kill every rank and every zygote."""
        self._tell(Asked(number=0, method="close"))

    def leave(self, code: int | None = None) -> None:
        """End the connection. The node exits with `code`; without one it reports that this node is gone."""
        with suppress(NodeLost, OSError):
            if code is not None:
                self._tell(Bye(code=code))
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(
        self,
        method: Literal["reserve", "warm", "run"],
        *,
        job_id: str = "",
        count: int = 0,
        preload: Mapping[str, str] | None = None,
        share: Share | None = None,
        report: Callable[[ShareEvent], None] = lambda _: None,
    ) -> Answered:
        """The answer to a call. Waits for it."""
        future: Future[Answered] = Future()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = (future, report)
        self._tell(Asked(number=number, method=method, job_id=job_id, count=count, preload=preload or {}, share=share))
        return future.result()

    def _tell(self, message: ToNode) -> None:
        if self._lost:
            self._fail_pending(self._lost)
            raise NodeLost(self._lost)
        with self._sending, suppress(OSError):  # the listener sees the same end
            self._connection.sendall(encode_frame(message))

    def _listen(self) -> None:
        why = "it left"
        try:
            while data := self._connection.recv(1 << 20):
                for message in self._reader.feed(data):
                    self._handle(message)
        except (OSError, ProtocolError) as error:
            why = str(error)
        self._fail_pending(f"{self.name} was lost: {why}")
        self._connection.close()

    def _handle(self, message: FromNode) -> None:
        if isinstance(message, Join):
            return
        with self._lock:
            future, report = self._pending.get(message.number, (None, None))
        if isinstance(message, Reported) and report is not None:
            report(message.event)
        elif isinstance(message, Answered) and future is not None:
            with self._lock:
                del self._pending[message.number]
            future.set_result(message)

    def _fail_pending(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason
            pending, self._pending = self._pending, {}
        for future, _ in pending.values():
            future.set_exception(NodeLost(self._lost))
