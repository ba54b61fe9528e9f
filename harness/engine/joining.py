"""How the nodes of a run find each other: the controller waits for the others at one address, and they serve it.

The address is not protected, as that of torchrun is not: whoever reaches it can take part.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from harness.engine.messages import FrameReader, Message, ProtocolError, ShareOutcome, encode_frame
from harness.engine.node import Node
from harness.engine.remote import (
    NODE_PROTOCOL_VERSION,
    Answered,
    Asked,
    Bye,
    FromNode,
    Join,
    Refused,
    RemoteNode,
    Reported,
    ToNode,
    keep_alive,
    node_name,
)
from harness.errors import HarnessError

_POLL_S = 0.2  # between two attempts to reach the controller
_HELLO_S = 10.0  # from a connection to its first message


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the nodes of a run meet, in the words of torchrun. `timeout_s`: until all of them have come."""

    nnodes: int
    node_rank: int
    endpoint: str  # HOST:PORT of the node with rank 0
    timeout_s: float

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the controller. HarnessError for an endpoint without a port."""
        host, _, port = self.endpoint.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise HarnessError(
                f"{self.endpoint!r} is no HOST:PORT.",
                where="--rdzv-endpoint",
                fix="give the name of the node with --node-rank 0 and a free port of it, as node-0:29400.",
            )
        return host, int(port)


def gather(rendezvous: Rendezvous, facts: Mapping[str, str]) -> tuple[RemoteNode, ...]:
    """Wait for all other nodes; returns them in rank order. Raises HarnessError when one is late."""
    _, port = rendezvous.address
    try:
        listener = socket.create_server(("", port), backlog=rendezvous.nnodes)
    except OSError as error:
        raise HarnessError(
            f"cannot listen on port {port}: {error.strerror}.",
            where=f"--rdzv-endpoint {rendezvous.endpoint}",
            fix="end what uses the port, or choose another one on all nodes.",
        ) from error
    nodes: dict[int, RemoteNode] = {}
    with listener:
        try:
            _wait_for_all(listener, rendezvous, facts, nodes)
        except BaseException:
            for node in nodes.values():
                node.leave()
            raise
    return tuple(nodes[rank] for rank in sorted(nodes))


def _wait_for_all(
    listener: socket.socket, rendezvous: Rendezvous, facts: Mapping[str, str], nodes: dict[int, RemoteNode]
) -> None:
    until_s = time.monotonic() + rendezvous.timeout_s
    while len(nodes) < rendezvous.nnodes - 1:
        listener.settimeout(max(0.01, until_s - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise _absent(rendezvous, nodes) from None
        with suppress(OSError, ProtocolError):  # whatever that was, it was no node
            _admit(connection, rendezvous, facts, nodes)


def _absent(rendezvous: Rendezvous, nodes: Mapping[int, RemoteNode]) -> HarnessError:
    absent = [str(rank) for rank in range(1, rendezvous.nnodes) if rank not in nodes]
    return HarnessError(
        f"{len(absent)} of {rendezvous.nnodes} nodes did not come within {rendezvous.timeout_s:g} s: node rank "
        f"{', '.join(absent)}.",
        where=f"--rdzv-endpoint {rendezvous.endpoint}",
        fix="start the same command there, with its --node-rank; --rdzv-timeout-s waits longer.",
    )


def _admit(
    connection: socket.socket, rendezvous: Rendezvous, facts: Mapping[str, str], nodes: dict[int, RemoteNode]
) -> None:
    """Accept a node, or reply with the reason for its refusal."""
    connection.settimeout(_HELLO_S)
    reader: FrameReader[FromNode] = FrameReader(FromNode)
    joined = _first(connection, reader)
    if not isinstance(joined, Join):
        connection.close()
        return
    refused = _refusal(joined, rendezvous, facts, nodes)
    if refused is not None:
        connection.sendall(encode_frame(refused))
        connection.close()
        if joined.node_rank not in nodes:
            raise HarnessError(refused.reason, where=f"node rank {joined.node_rank}", fix=refused.fix)
        return
    keep_alive(connection)
    nodes[joined.node_rank] = RemoteNode(connection, joined, reader)


def _first(connection: socket.socket, reader: FrameReader[FromNode]) -> FromNode | None:
    while data := connection.recv(1 << 16):
        for message in reader.feed(data):
            return message
    return None


def _refusal(
    joined: Join, rendezvous: Rendezvous, facts: Mapping[str, str], nodes: Mapping[int, RemoteNode]
) -> Refused | None:
    who = node_name(joined.node_rank, joined.capacity.host)
    if joined.node_rank in nodes or not 0 < joined.node_rank < rendezvous.nnodes or joined.nnodes != rendezvous.nnodes:
        return Refused(
            reason=f"{who} of {joined.nnodes} is not expected: there are {rendezvous.nnodes}, of different ranks.",
            fix="give every node another --node-rank, from 0 on, and the same --nnodes.",
        )
    mine, theirs = {"protocol": str(NODE_PROTOCOL_VERSION), **facts}, {"protocol": str(joined.version), **joined.facts}
    names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    if not names:
        return None
    told = "; ".join(f"{name}: {theirs.get(name, 'none')}, not {mine.get(name, 'none')}" for name in names)
    return Refused(
        reason=f"{who} differs from node 0: {told}.", fix="install the same on all nodes, and give the same options."
    )


def join(rendezvous: Rendezvous, node: Node, facts: Mapping[str, str]) -> int:
    """Serve the controller until the run ends; returns the exit code of the run.

    HarnessError when nobody answers in time, when it refuses this node, and when it is lost; no rank is left then.
    """
    connection = _connect(rendezvous)
    hello = Join(
        version=NODE_PROTOCOL_VERSION,
        node_rank=rendezvous.node_rank,
        nnodes=rendezvous.nnodes,
        capacity=node.capacity,
        facts=facts,
    )
    try:
        keep_alive(connection)
        connection.sendall(encode_frame(hello))
        return _Server(connection, node).serve(rendezvous)
    except (OSError, ProtocolError) as error:
        raise _lost(rendezvous, str(error)) from error
    finally:
        node.close()
        connection.close()


def _connect(rendezvous: Rendezvous) -> socket.socket:
    until_s = time.monotonic() + rendezvous.timeout_s
    while True:
        try:
            return socket.create_connection(rendezvous.address, timeout=rendezvous.timeout_s)
        except OSError as error:
            if time.monotonic() >= until_s:
                raise HarnessError(
                    f"nobody answered within {rendezvous.timeout_s:g} s: {error.strerror or error}.",
                    where=f"--rdzv-endpoint {rendezvous.endpoint}",
                    fix="start the same command there with --node-rank 0, and see that the port can be reached.",
                ) from error
            time.sleep(_POLL_S)


def _lost(rendezvous: Rendezvous, why: str) -> HarnessError:
    return HarnessError(
        f"node 0 is gone before the run was over: {why}. The ranks of this node were ended.",
        where=f"--rdzv-endpoint {rendezvous.endpoint}",
        fix="see what node 0 says, and start the command on all nodes again.",
    )


class _Server:
    """Answers the calls of the controller."""

    def __init__(self, connection: socket.socket, node: Node) -> None:
        self._connection = connection
        self._node = node
        self._sending = threading.Lock()

    def serve(self, rendezvous: Rendezvous) -> int:
        """Until the controller says how the run has ended."""
        reader: FrameReader[ToNode] = FrameReader(ToNode)
        while data := self._connection.recv(1 << 20):
            for message in reader.feed(data):
                if isinstance(message, Bye):
                    return message.code
                if isinstance(message, Refused):
                    raise HarnessError(message.reason, where=f"--rdzv-endpoint {rendezvous.endpoint}", fix=message.fix)
                self._handle(message)
        raise _lost(rendezvous, "it closed the connection")

    def _handle(self, asked: Asked) -> None:
        """What is short is done in order: slots are free before they are asked for again."""
        if asked.method == "free":
            self._node.free(asked.job_id)
        elif asked.method == "release":
            self._node.release(asked.job_id)
        elif asked.method == "close":
            self._node.close()
        elif asked.method == "end":
            self._node.end(asked.job_id)
        else:
            threading.Thread(target=self._answer, args=(asked,), daemon=True).start()

    def _answer(self, asked: Asked) -> None:
        answer = Answered(number=asked.number)
        try:
            if asked.method == "reserve":
                answer = msgspec.structs.replace(answer, reservation=self._node.reserve(asked.job_id, asked.count))
            elif asked.method == "warm":
                self._node.warm(asked.preload)
            else:
                answer = msgspec.structs.replace(answer, outcome=self._run(asked))
        except (OSError, HarnessError) as error:
            answer = msgspec.structs.replace(answer, error=str(error))
        self._send(answer)

    def _run(self, asked: Asked) -> ShareOutcome:
        assert asked.share is not None
        return self._node.run(asked.share, lambda event: self._send(Reported(number=asked.number, event=event)))

    def _send(self, message: Message) -> None:
        with self._sending, suppress(OSError):  # `serve` sees the same end
            self._connection.sendall(encode_frame(message))
