"""`--fabric gloo` as a user meets it: a case without and with a fault, and the command that repeats it."""

from __future__ import annotations

from pathlib import Path

from harness.running.plan import DEFAULT_PROGRAM
from tests.acceptance.conftest import REPOSITORY
from tests.acceptance.inside import Inside
from tests.lines import read_run
from tests.zygotes import Zygotes

# The whole tier, with ranks whose sums have another order over gloo, is `make gloo`; two mesh axes and planted faults
# are in `tests/worker/test_gloo.py` and `tests/power/test_gloo.py`.
CASE = "tp2-rowwise-ac.full-v2048-s2-f64"  # of the tier, with fewer steps


def test_a_case_passes_over_gloo_and_a_planted_fault_is_found(tmp_path: Path, warm: Zygotes) -> None:
    out = tmp_path / "result.json"
    here = Inside(
        REPOSITORY, {"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM, "FP8_HARNESS_STATE": str(tmp_path / "state")}, zygotes=warm
    )
    words = ("run", CASE, "--device", "cpu", "--fabric", "gloo", "--json", str(out))
    done = here.run(*words)
    assert done.returncode == 0, done.stdout
    report = read_run(out)
    assert [(case["id"], case["verdict"]) for case in report["cases"]] == [(CASE, "passed")]
    assert report["provenance"]["fabric"] == report["environment"]["fabric"] == "gloo"
    assert all("--fabric gloo" in case["command"] for case in report["cases"])
    assert here.run(*words, "--inject", "fault:sequence_shards_swapped").returncode == 1
    (case,) = read_run(out)["cases"]
    assert case["verdict"] == "numeric" and case["findings"][0]["module"].startswith("layers.0."), case["findings"]
