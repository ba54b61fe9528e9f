"""The fork server when its controller sends what is no message: one line on stderr, and every job of it is told."""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine.messages import Finished, FrameReader, FromForkServer, Hello, Message, Share, Submit, encode_frame
from tests.jobs import make_share
from tests.worker.processes import start_python

GARBAGE = b"\x00\x00\x00\x04oops"


def sleeping_share(folder: Path) -> Share:
    payload = json.dumps({"*": "sleep"}).encode()
    return make_share(folder, 2, payload)


class ForkServer:
    """A fork server with toy ranks, and the other end of its socket."""

    def __init__(self) -> None:
        self.socket, far = socket.socketpair()
        self.socket.settimeout(30)
        self._reader: FrameReader[FromForkServer] = FrameReader(FromForkServer)
        fd = far.fileno()
        with far:
            words = ("-m", "harness.engine.fork_server", "--fd", str(fd), "tests.worker.toyprogram")
            self.process = start_python(*words, pass_fds=(fd,), stderr=subprocess.PIPE, text=True)

    def send(self, message: Message) -> None:
        self.socket.sendall(encode_frame(message))

    def messages(self) -> Iterator[FromForkServer]:
        """What it sends until it closes its end."""
        while data := self.socket.recv(1 << 16):
            yield from self._reader.feed(data)


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.socket.close()
    started.process.kill()
    started.process.communicate()


@pytest.mark.parametrize(
    ("garbage", "why"),
    [(GARBAGE, "cannot decode a frame: "), (b"\xff\xff\xff\xff", "got a frame of 4294967295 bytes; the limit is ")],
    ids=["no message", "too long"],
)
def test_unreadable_data_ends_the_fork_server_with_one_line_and_its_jobs_as_infra(
    fork_server: ForkServer, tmp_path: Path, garbage: bytes, why: str
) -> None:
    messages = fork_server.messages()
    assert isinstance(next(messages), Hello)
    fork_server.send(Submit(ticket=7, share=sleeping_share(tmp_path)))
    fork_server.socket.sendall(garbage)
    (finished,) = messages
    assert isinstance(finished, Finished) and finished.ticket == 7
    assert finished.outcome.infra.startswith(f"the controller sent unreadable data: {why}")
    _, err = fork_server.process.communicate(timeout=20)
    assert fork_server.process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith(f"fp8-harness fork server: the controller sent unreadable data: {why}")
    assert line.endswith("Fix: run the same version of fp8-harness on both sides.")


def test_the_end_of_the_controller_is_no_error(fork_server: ForkServer) -> None:
    assert isinstance(next(fork_server.messages()), Hello)
    fork_server.socket.close()
    _, err = fork_server.process.communicate(timeout=20)
    assert (fork_server.process.returncode, err) == (0, "")
