"""Folders of runs that were killed are removed by the next run, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.engine.node import Scratch
from tests.worker.processes import start_python

OWNER = """
import sys, time
from pathlib import Path
from harness.engine.node import Scratch
print(Scratch(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_only_folders_of_killed_runs_are_removed(tmp_path: Path) -> None:
    others = tmp_path / "fp8-harness-jobs-of-nobody"
    others.mkdir()
    with start_python("-c", OWNER, str(tmp_path), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "0001").mkdir()
        alive = Scratch(tmp_path)
        assert left.is_dir() and alive.path.is_dir(), "both have owners"
        owner.kill()
    mine = Scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted((others, alive.path, mine.path))
    for scratch in (alive, mine, mine):
        scratch.close()
    assert list(tmp_path.iterdir()) == [others], "without a lock it may be anybody's"
