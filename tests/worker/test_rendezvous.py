"""Where ranks meet: a TCP store in a process of its own, which ends with its controller, and a prefix for every job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from harness.engine.program import RankContext, rank_context
from harness.engine.storeprocess import StoreProcess
from harness.worker.process_group import open_store
from tests.jobs import make_share
from tests.worker.processes import start_python, wait_until

PROGRAM = "harness.worker.process_group"


@pytest.fixture(scope="module")
def store() -> Iterator[StoreProcess]:
    process = StoreProcess(PROGRAM)
    yield process
    process.close()


def context(folder: Path, rendezvous: str = "file") -> RankContext:
    share = msgspec.structs.replace(make_share(folder, 1), rendezvous=rendezvous)
    return rank_context(share, 0, lambda _: None)


def test_jobs_share_a_port_and_no_key(store: StoreProcess, tmp_path: Path) -> None:
    first, second = store.address("0001-tp2"), store.address("0002-tp2")
    assert first.rpartition("/")[0] == second.rpartition("/")[0]
    one, same, other = (open_store(context(tmp_path, address)) for address in (first, first, second))
    one.set("key", "value")
    assert same.get("key") == b"value"
    assert not other.check(["key"])


def test_ranks_of_one_node_meet_in_their_folder(tmp_path: Path) -> None:
    one, other = (open_store(context(tmp_path)) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_it_ends_with_a_controller_that_is_killed() -> None:
    code = (
        "import sys, time; from harness.engine.storeprocess import StoreProcess; "
        "print(StoreProcess('tests.worker.storeprogram').address('x'), flush=True); time.sleep(60)"
    )
    with start_python("-c", code, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None and controller.stdout.readline() == b"tcp://127.0.0.1:4711/x\n"
        (child,) = psutil.Process(controller.pid).children()
        controller.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
