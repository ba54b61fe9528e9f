"""`--fabric gloo` as a user meets it: a case of the smoke tier on real ranks, and the command that repeats it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lines import read_run

REPOSITORY = Path(__file__).parents[2]
# Four ranks, whose sums have another order over gloo, with FP8 as users run it. `make gloo` has the whole tier;
# `tests/worker/test_gloo.py` and `tests/power/test_gloo.py` have two ranks, two mesh axes and TP.
CASE = "fsdp4-tensorwise-ag.fp8pre-v2048-b16"


def test_a_wide_case_of_the_smoke_tier_passes_over_gloo(tmp_path: Path) -> None:
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
