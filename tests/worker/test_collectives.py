"""The virtual collectives on real gloo ranks: float8 moves, AVG and PREMUL_SUM reduce, nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engine.wire import Job
from harness.engine.zygote import ZygoteEngine


def test_every_collective_is_right_for_every_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with ZygoteEngine("collectiveprogram") as engine:
        job = Job(job_id="collectives", world_size=4, payload=b"", deadline_s=60, folder=str(tmp_path))
        outcome = engine.run(job)
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
    reports = [json.loads(rank.payload or b"") for rank in outcome.ranks]
    assert len(reports) == 4
    assert len(reports[0]) == 4 * 7 + 7
    wrong = {(rank, name) for rank, report in enumerate(reports) for name, right in report.items() if not right}
    assert not wrong
