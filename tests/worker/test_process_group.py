"""How ranks join: what NCCL is told."""

from __future__ import annotations

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


def test_nccl_gets_the_device_and_gives_up_before_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_NCCL_DESYNC_DEBUG", raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **given: calls.append((*args, given)))
    device = join(context(tmp_path, device=3), "cuda")
    chosen, (backend, given) = calls
    assert chosen == device == given["device_id"] == torch.device("cuda", 3)
    assert backend == "nccl" and given["timeout"].total_seconds() == 15.0
