"""The virtual collectives on real ranks: float8 moves, every reduction is right, a mismatch is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine.zygote_engine import ZygoteEngine
from tests.jobs import make_share, run_alone


@pytest.fixture(scope="module")
def engine() -> Iterator[ZygoteEngine]:
    with ZygoteEngine("tests.worker.collectiveprogram") as zygote:
        yield zygote


def test_ranks_that_disagree_are_told_so_at_once(engine: ZygoteEngine, tmp_path: Path):
    outcome = run_alone(engine, make_share(tmp_path, 4, b"mismatch"))
    assert outcome.status == "crash"
    assert "all_gather of 16 bytes" in outcome.message
    assert "all_gather of 12 bytes" in outcome.message
    assert not list(tmp_path.glob("fabric-*"))


def test_a_message_that_does_not_fit_is_told_by_who_receives_it(engine: ZygoteEngine, tmp_path: Path):
    outcome = run_alone(engine, make_share(tmp_path, 2, b"misfit"))
    assert outcome.status == "crash"
    message = "rank 0 sends 4 elements of bfloat16, and rank 1 receives 4 of float32"
    assert message in f"{[rank.message for rank in outcome.ranks]}"


# gloo rounds at every hop, and uses the tensors of other ranks for what only one rank gets.
GLOO = {"bfloat16 sums are rounded once", "reduce"}


@pytest.mark.parametrize(("fabric", "not_so"), [("shared", set()), ("gloo", GLOO)])
def test_every_collective_is_right_for_every_dtype(engine: ZygoteEngine, tmp_path: Path, fabric: str, not_so: set[str]):
    outcome = run_alone(engine, make_share(tmp_path, 4, fabric.encode()))
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
    reports = [json.loads(rank.payload or b"") for rank in outcome.ranks]
    assert len(reports) == 4
    assert len(reports[0]) == 4 * 7 + 13 + 2 * (fabric == "shared")
    assert {name for report in reports for name, right in report.items() if not right} == not_so
