"""`--fabric gloo` as a user meets it: the smoke tier on real ranks, and the command that repeats a case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EAGER = ("--select", "compile=none")  # the compiled case takes as long as all others; `make gloo` has it


def test_the_smoke_tier_passes_over_gloo(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ("run", "smoke", "--device", "cpu", "--fabric", "gloo", *EAGER)
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words, "--json", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(out.read_text())
    assert len(report["cases"]) == 7 and {case["verdict"] for case in report["cases"]} == {"passed"}
    assert report["provenance"]["fabric"] == report["environment"]["fabric"] == "gloo"
    assert all("--fabric gloo" in case["command"] for case in report["cases"])
