"""`--fabric gloo` as a user meets it: a case of the smoke tier on real ranks, and the command that repeats it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lines import read_run

REPOSITORY = Path(__file__).parents[2]
# The whole tier, with ranks whose sums have another order over gloo, is `make gloo`; two mesh axes and planted faults
# are in `tests/worker/test_gloo.py` and `tests/power/test_gloo.py`.
CASE = "tp2-rowwise-ac.full-v2048-f64"


def test_a_case_of_the_smoke_tier_passes_over_gloo(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ("run", CASE, "--device", "cpu", "--fabric", "gloo")
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words, "--json", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    report = read_run(out)
    assert [(case["id"], case["verdict"]) for case in report["cases"]] == [(CASE, "passed")]
    assert report["provenance"]["fabric"] == report["environment"]["fabric"] == "gloo"
    assert all("--fabric gloo" in case["command"] for case in report["cases"])
