"""What tests of engines ask of the processes that are alive."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def start_python(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """A Python process that can import the harness and the tests; `options` are those of Popen."""
    return subprocess.Popen([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)


def wait_until(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Fails where it takes longer than `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until_s, "did not happen in time"
        time.sleep(0.001)


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The addresses and ports at which these processes accept connections."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {
                (connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process that a test started outlives it, and no rank its job."""
    before = set(psutil.Process().children(recursive=True))  # other files leave some
    yield
    now = set(psutil.Process().children(recursive=True))
    left = [child for child in now - before if child.status() != psutil.STATUS_ZOMBIE]
    assert [child for child in left if "harness.engine.fork_server" not in child.cmdline()] == []
    assert [child for child in left if child.ppid() != os.getpid()] == [], "no rank outlives its job"
