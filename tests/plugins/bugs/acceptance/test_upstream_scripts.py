"""Every script of a draft shows its fault with the installed versions, as the draft says, and not with the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.plugins.bugs.upstream import Record, read_records, run_script
from harness.project import find_project
from tests.plugins.bugs.patched import patched_environment, with_fix

ROOT = find_project().root
QUICK = ("cast_config_shared",)
RECORDS = [
    pytest.param(record, id=record.name, marks=() if record.name in QUICK else pytest.mark.sweep)
    for record in read_records(find_project())
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_script_shows_what_its_draft_says_and_nothing_with_the_fix(record: Record, tmp_path: Path) -> None:
    if record.missing:
        pytest.skip(f"{', '.join(record.missing)} not installed")
    code, printed = run_script(record)
    assert (code, printed) == (1, record.output.strip())
    if record.fix:
        command, environment = with_fix(record.script, str(ROOT / record.fix)), None
    else:
        command = [sys.executable, str(record.script)]
        environment = patched_environment(record.script.with_suffix(".patch"), tmp_path)
    fixed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr


def test_the_draft_is_written_by_name_with_script_patch_and_versions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "bug", "export", "float8_weight_unflatten", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "draft of an issue\nexit code 1" in done.stdout, done.stdout + done.stderr
    text = (tmp_path / "float8_weight_unflatten.md").read_text()
    parts = ("# [float8]", "```python", "```diff", "blob/", "PyTorch version: ", "[pip3] torchao==", "CPU only")
    assert [part for part in parts if part not in text] == []
