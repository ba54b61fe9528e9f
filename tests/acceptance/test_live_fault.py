"""The live fault of async TP as a user meets it: known, right with its fix, and no cover for another fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.checks.graphs import ROWS
from tests.acceptance.conftest import REPOSITORY, Command
from tests.lines import read_run

CASE = "atp2-rowwise-graph-v2048-s3-b16"


def judged(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the case, run on real ranks with this project's cases and goldens."""
    out = folder / "result.json"
    words = ("--root", str(REPOSITORY), "run", "--device", "cpu", CASE, "--json", str(out), *arguments)
    done = Command(folder, {"FP8_HARNESS_PROGRAM": ""}).run(*words, timeout_s=400)
    (case,) = read_run(out)["cases"]
    return done.returncode, case


@pytest.mark.sweep  # six compiled runs; `tests/worker/test_compiled.py` locates the fault and mends it in every run
def test_known_and_right_with_its_fix(tmp_path: Path) -> None:
    code, case = judged(tmp_path)
    assert (code, case["verdict"], case["expectation"]) == (0, "known", "async-tp-scatters-rows-by-batch-rowwise")
    (rows,) = [finding for finding in case["findings"] if finding["rule"] == ROWS.name and finding["rank"] == 0]
    assert rows["values"]["operator"] == "fused_scaled_matmul_reduce_scatter"
    assert "row [1, 0] of this rank holds row [0, 0] of TP rank 1" in rows["found"]
    assert (case["with_fix"]["fixes"], case["with_fix"]["verdict"]) == (
        ["cases/fixes/scattered_rows.py:apply"],
        "passed",
    )
    assert {"parity", "graphs", "graph_scales", "traffic", "metamorphic"} <= set(case["with_fix"]["checks"])


@pytest.mark.sweep  # four compiled runs; `tests/power` has eager known cases in every run
def test_another_fault_does_not_hide_behind_it(tmp_path: Path) -> None:
    """A lost gradient is no larger than what the live fault does to gradients; the run with the fix shows it."""
    code, case = judged(tmp_path, "--inject", "fault:one_gradient_lost")
    assert code == 1
    assert case["verdict"] in ("numeric", "invariant")
