"""How and where ranks meet: a TCP store in a process of its own, a prefix for every job, and what NCCL is told."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist

from harness.engine.processes import StoreProcess
from harness.engine.program import RankContext, rank_context
from harness.worker.process_group import join, open_store
from tests.jobs import make_share
from tests.worker.processes import listening, start_python, wait_until

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


def test_the_store_listens_at_its_own_address_alone(store: StoreProcess) -> None:
    port = int(store.address("x").split(":")[2].partition("/")[0])
    children = psutil.Process().children(recursive=True)
    assert {where for where in listening(children) if where[1] == port} == {("127.0.0.1", port)}


def test_ranks_of_one_node_meet_in_their_folder(tmp_path: Path) -> None:
    one, other = (open_store(context(tmp_path)) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_it_ends_with_a_controller_that_is_killed() -> None:
    code = (
        "import sys, time; from harness.engine.processes import StoreProcess; "
        "print(StoreProcess('tests.worker.storeprogram').address('x'), flush=True); time.sleep(60)"
    )
    with start_python("-c", code, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None and controller.stdout.readline() == b"tcp://127.0.0.1:4711/x\n"
        (child,) = psutil.Process(controller.pid).children()
        controller.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def joining(folder: Path, **given: Any) -> RankContext:
    known: dict[str, Any] = {"rank": 0, "local_rank": 0, "world_size": 1, "payload": b"", "deadline_s": 30.0}
    known |= {"folder": folder, "device": None, "rendezvous": "file", **given}
    return RankContext(**known, report_phase=lambda _: None)


def join_and_reduce(folder: Path) -> tuple[str, str, list[float]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device = join(joining(folder, rendezvous=f"tcp://127.0.0.1:{store.port}/0001-tp2"), "gloo")
    mine = torch.ones(2)
    dist.all_reduce(mine)
    return device.type, dist.get_backend(), mine.tolist()


def test_gloo_joins_through_a_tcp_store_under_the_prefix_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # In an interpreter of its own: an earlier test may have put the shared-memory backend under the operators of this
    # one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as interpreter:
        joined = interpreter.submit(join_and_reduce, tmp_path).result(60)
    assert joined == ("cpu", "gloo", [1.0, 1.0])
    assert not list(tmp_path.iterdir())


def test_nccl_differs_in_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_NCCL_DESYNC_DEBUG", raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: calls.append((*args, given)))
    device = join(joining(tmp_path, device=3), "nccl")
    chosen, (backend, given) = calls
    assert chosen == device == given["device_id"] == torch.device("cuda", 3)
    assert backend == "nccl" and given["timeout"].total_seconds() == 15.0
