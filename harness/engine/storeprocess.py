"""The store process: a TCP store of torch where ranks of several nodes meet, one for a run, a prefix for every job.

A process of its own: the server has threads, which neither the controller nor a zygote may have, and one port
for the whole run cannot be taken by another program between two jobs.
"""

import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from harness.engine.folder import tail
from harness.engine.interpreter import module_command, start

_START_S = 120.0  # it imports torch


class StoreProcess:
    """Started by the first `address`, ended by `close` or with this process; ranks reach it at `host`, and only there.

    `program` is a module: it gets the number of a socket and `host`, sends its port and serves until that is closed.
    """

    def __init__(self, program: str, host: str = "127.0.0.1") -> None:
        self._program = program
        self._host = host
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._near: socket.socket | None = None

    def address(self, prefix: str) -> str:
        """The rendezvous of the job with this prefix: tcp://HOST:PORT/PREFIX. Raises OSError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return f"tcp://{self._host}:{self._port}/{prefix}"

    def _start(self) -> None:
        self._near, far = socket.socketpair()
        with tempfile.TemporaryFile() as output:
            with far:
                command = module_command(self._program, [str(far.fileno()), self._host])
                self._process = start(command, output, environ={}, fds=[far.fileno()])
            self._near.settimeout(_START_S)
            port = b""
            with suppress(TimeoutError):
                port = self._near.recv(16)
            if not port:
                self._end()
                said = tail(Path(f"/proc/self/fd/{output.fileno()}"))
                raise OSError(f"the store where they meet sent no port\n{said}")
            self._port = int(port)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None and self._near is not None:
            self._near.close()
            self._process.kill()
            self._process.wait()
