"""`--fabric gloo` as a user meets it: cases of the smoke tier on real ranks, and the command that repeats each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lines import read_run

REPOSITORY = Path(__file__).parents[2]
# Four ranks, whose sums have another order over gloo: with FP8 as users run it, and with two mesh axes. `make gloo` has
# the whole tier; `tests/worker/test_gloo.py` and `tests/power/test_gloo.py` have two ranks and TP.
CASES = ("fsdp4-tensorwise-ag.fp8pre-v2048-b16", "hsdp2x2-bf16-v2048-f64")


def test_the_widest_cases_of_the_smoke_tier_pass_over_gloo(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    named = list(CASES)
    words = ("run", *named, "--device", "cpu", "--fabric", "gloo")
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
    assert [(case["id"], case["verdict"]) for case in report["cases"]] == [(name, "passed") for name in CASES]
    assert report["provenance"]["fabric"] == report["environment"]["fabric"] == "gloo"
    assert all("--fabric gloo" in case["command"] for case in report["cases"])
