"""The live fault of async TP as a user meets it: known on this torch, out of date as soon as the fix is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CASE = "atp2-rowwise-graph-v2048-b16"
FIX = f"{REPOSITORY / 'cases' / 'fixes' / 'scattered_rows.py'}:apply"


def judged(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the case, run on real ranks with this project's cases and goldens."""
    out = folder / "result.json"
    words = ("run", "--root", str(REPOSITORY), "--device", "cpu", "--case", CASE, "--json", str(out), *arguments)
    done = subprocess.run([sys.executable, "-m", "harness", *words], cwd=folder, check=False, timeout=400)
    (case,) = json.loads(out.read_text())["cases"]
    return done.returncode, case


def test_known_here_and_to_be_closed_where_it_is_mended(tmp_path: Path) -> None:
    code, found = judged(tmp_path)
    assert (code, found["verdict"], found["expectation"]) == (0, "known", "async-tp-scatters-rows-by-batch")
    (rows,) = [each for each in found["findings"] if each["check"] == "graphs" and each["rank"] == 0]
    assert "fused_scaled_matmul_reduce_scatter gives wrong rows" in rows["message"]
    assert "row [1, 0] of this rank holds row [0, 0] of TP rank 1" in rows["found"]
    code, mended = judged(tmp_path, "--inject", FIX)
    assert (code, mended["verdict"]) == (1, "unexpected_pass")
    assert "close the record" in mended["findings"][0]["message"]
