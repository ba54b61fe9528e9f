"""New processes of the engine: their command line, environment and start, the folder of a job, and the store of a run.

The store, a TCP store of torch, is where ranks of several nodes meet, with a prefix for every job. It is a process of
its own: the server has threads, which neither the controller nor a fork server may have, and one port for the whole run
cannot be taken by another program between two jobs.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from harness.engine.symptoms import names_a_cause

MARK = "FP8_HARNESS_ENGINE"  # environment variable that marks every process an engine starts, so that it can find them

# The child must import the same modules as this process: neither a `harness` folder in the working directory (-P) nor
# another installation. PYTHONPATH is no alternative: every Python program that a rank starts would inherit it.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); name = sys.argv.pop(1); "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)

# One thread per rank: the fork server must be single-threaded when it forks, and ranks share few cores. A program may
# raise the number after the fork.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# `torch.cuda.is_available()`, which torchao calls when it is imported, then asks NVML and makes no CUDA context that a
# fork would break: https://docs.pytorch.org/docs/main/notes/cuda.html#environment-variables.
# CUDA must number GPUs as nvidia-smi does: it sorts them by speed by default.
_DEVICES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# Compilers and Python in ranks speak English in UTF-8: inductor decodes what they say and write as UTF-8, whatever the
# locale of the user.
_LOCALE = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module of the harness in this Python."""
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])  # noqa: PTH100  '' means the working directory
    return [sys.executable, "-P", "-c", _BOOT, search_path, module, *arguments]


def child_environ(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with one compute thread, settings of locale and GPUs, then `extra`."""
    return {**os.environ, **dict.fromkeys(_THREADS, "1"), **_LOCALE, **_DEVICES, **extra}


def start(
    command: Sequence[str], output: IO[bytes], *, environ: Mapping[str, str], fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command in its own session. It writes to `output` and inherits `fds`. Raises OSError."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        env=child_environ(environ),
        start_new_session=True,
    )


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
        """Return the rendezvous of the job with this prefix: tcp://HOST:PORT/PREFIX. Raises OSError."""
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


_LOG_BYTES = 1 << 20  # of the output of a rank, searched for what names a cause
_TAIL_BYTES = 8192
_TAIL_LINES = 40
MAX_LOG_BYTES = 64 << 20  # of the output of a rank; with more, its middle is cut
KEPT_LOG_BYTES = 1 << 20  # of its beginning, where the cause of much output usually is
_DUMP_BYTES = 65536  # stacks of about 100 threads
LOG_IS_CUT = f"\nfp8-harness: output is cut here, because the log of a rank has at most {MAX_LOG_BYTES >> 20} MiB.\n"


class JobFolder(msgspec.Struct, frozen=True):
    path: Path

    def prepare(self) -> None:
        """Create the folder and its TMPDIR. Raises OSError."""
        self.tmp.mkdir(parents=True, exist_ok=True)

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    def log(self, rank: int) -> Path:
        """Stdout and stderr of a rank, interleaved as written."""
        return self.path / f"rank{rank}.log"

    def dump(self, rank: int) -> Path:
        """Return the stacks of a rank, which faulthandler writes on request and on a fatal signal."""
        return self.path / f"rank{rank}.dump"

    def log_tail(self, rank: int) -> str:
        """Return the lines of a rank's output that name a cause, then its last ones; empty if it printed none."""
        lines = read_end(self.log(rank), _LOG_BYTES).splitlines()
        causes = [line for line in lines[:-_TAIL_LINES] if names_a_cause(line)][:_TAIL_LINES]
        return "\n".join((*causes, tail(self.log(rank)))) if causes else tail(self.log(rank))

    def bound_logs(self, ranks: Iterable[int]) -> None:
        """Cut what is too long, and say so there. Ranks append, so that they go on behind it and wait for nothing."""
        for rank in ranks:
            with suppress(OSError):  # not started yet, or a full disk
                if self.log(rank).stat().st_size > MAX_LOG_BYTES:
                    os.truncate(self.log(rank), KEPT_LOG_BYTES)
                    with self.log(rank).open("a") as log:
                        log.write(LOG_IS_CUT)

    def dump_text(self, rank: int) -> str:
        return read_end(self.dump(rank), _DUMP_BYTES)


def tail(path: Path) -> str:
    """Return the last 40 lines of a text file, at most 8 KiB; empty if it does not exist."""
    return "\n".join(read_end(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def read_end(path: Path, size: int) -> str:
    """Return the last bytes of a text file, at most `size`; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
