"""How ranks join: a TCP store of several nodes, and what NCCL is told."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.engine.program import RankContext
from harness.worker.process_group import join


def context(folder: Path, **given: Any) -> RankContext:
    known: dict[str, Any] = {"rank": 0, "local_rank": 0, "world_size": 1, "payload": b"", "deadline_s": 30.0}
    known |= {"folder": folder, "device": None, "rendezvous": "file", **given}
    return RankContext(**known, report_phase=lambda _: None)


def join_and_reduce(folder: Path) -> tuple[str, str, list[float]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device = join(context(folder, rendezvous=f"tcp://127.0.0.1:{store.port}/0001-tp2"), "gloo")
    mine = torch.ones(2)
    dist.all_reduce(mine)
    return device.type, dist.get_backend(), mine.tolist()


def test_gloo_joins_through_a_tcp_store_under_the_prefix_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # In an interpreter of its own: an earlier test may have put the shared fabric under the operators of this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as interpreter:
        joined = interpreter.submit(join_and_reduce, tmp_path).result(60)
    assert joined == ("cpu", "gloo", [1.0, 1.0])
    assert not list(tmp_path.iterdir())


def test_nccl_differs_in_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_NCCL_DESYNC_DEBUG", raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: calls.append((*args, given)))
    device = join(context(tmp_path, device=3), "nccl")
    chosen, (backend, given) = calls
    assert chosen == device == given["device_id"] == torch.device("cuda", 3)
    assert backend == "nccl" and given["timeout"].total_seconds() == 15.0
