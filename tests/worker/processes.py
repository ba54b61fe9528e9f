"""What tests of engines ask of the processes that are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest


def wait_until(true: Callable[[], bool], timeout_s: float = 2.0) -> float:
    """How long it took, in seconds; fails where it takes longer than `timeout_s`."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < timeout_s, "did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - began_s


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process that a test started outlives it, and no rank its job."""
    before = set(psutil.Process().children(recursive=True))  # other files leave some
    yield
    now = set(psutil.Process().children(recursive=True))
    left = [child for child in now - before if child.status() != psutil.STATUS_ZOMBIE]
    assert [child for child in left if "harness.engine.zygote" not in child.cmdline()] == []
    assert [child for child in left if child.ppid() != os.getpid()] == [], "no rank outlives its job"
