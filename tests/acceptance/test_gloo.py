"""`--backend gloo` as a user meets it: a case without and with a fault, and the command that repeats it.

And the live fault of async TP: known, right with its fix, and no cover for another fault.
"""

from pathlib import Path
from typing import Any

import pytest

from harness.checks.graphs import ROWS
from harness.running.plan import DEFAULT_PROGRAM
from tests.acceptance.conftest import REPOSITORY, Command, Inside
from tests.fork_servers import ForkServers
from tests.lines import read_run

# The whole tier, with ranks whose sums have another order over gloo, is `make gloo`; two mesh axes and injected faults
# are in `tests/worker/test_gloo.py` and `tests/power/test_matrix.py`.
CASE = "tp2-rowwise-ac.full-v2048-s2-f64"  # of the tier, with fewer steps


def test_a_case_passes_over_gloo_and_a_planted_fault_is_found(tmp_path: Path, warm: ForkServers) -> None:
    out = tmp_path / "result.json"
    here = Inside(
        REPOSITORY,
        {"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM, "FP8_HARNESS_STATE": str(tmp_path / "state")},
        fork_servers=warm,
    )
    words = ("run", CASE, "--device", "cpu", "--backend", "gloo", "--json", str(out))
    done = here.run(*words)
    assert done.returncode == 0, done.stdout
    report = read_run(out)
    assert [(case["id"], case["verdict"]) for case in report["cases"]] == [(CASE, "passed")]
    assert report["provenance"]["backend"] == report["environment"]["backend"] == "gloo"
    assert all("--backend gloo" in case["command"] for case in report["cases"])
    assert here.run(*words, "--inject", "fault:sequence_shards_swapped").returncode == 1
    (case,) = read_run(out)["cases"]
    assert case["verdict"] == "numeric" and case["findings"][0]["module"].startswith("layers.0."), case["findings"]


COMPILED = "atp2-rowwise-graph-v2048-s3-b16"


def judged(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the case, run on real ranks with this project's cases and goldens."""
    out = folder / "result.json"
    words = ("run", "--root", str(REPOSITORY), "--device", "cpu", COMPILED, "--json", str(out), *arguments)
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
