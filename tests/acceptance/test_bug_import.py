"""`fp8-harness bug import`: a report becomes a file in cases/bugs, and errors are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

REPORT = """# float8 crash with TP
pytorch/ao#77 on 2025-06-03
rowwise, TP=2. `RuntimeError: boom`
- torch 2.8.0
"""
FILE = "cases/bugs/ao-77.toml"


def test_a_report_becomes_a_bug_file_that_is_listed(project: Command) -> None:
    (project.folder / "report.md").write_text(REPORT)
    done = project.call("bug", "import", "report.md")
    assert done.returncode == 0, done.stderr
    assert f"wrote {FILE}\nrun it: fp8-harness run {FILE}\n" in done.stdout
    assert '  tp = 2: "rowwise, TP=2"' in done.stdout
    assert "seen: crash, torch 2.8.0; RuntimeError: boom" in done.stdout
    assert "tp2-rowwise-v2048-gb2-b16" in project.call("list", FILE).stdout
    assert "ao-77" in project.call("bug", "list").stdout
    again = project.call("bug", "import", "report.md")
    assert again.returncode == 2 and "this file exists" in again.stderr
    assert project.call("bug", "import", "report.md", "--force").returncode == 0


def test_json_has_every_list(project: Command) -> None:
    (project.folder / "report.md").write_text(REPORT)
    options = ("--title", "boom", "--version", "torchao=0.12.0")
    done = project.call("bug", "import", "report.md", "--dry-run", "--json", "-", *options)
    tree = json.loads(done.stdout)
    assert (tree["title"], tree["versions"]) == ("boom", {"torch": "2.8.0", "torchao": "0.12.0"})
    assert (tree["id"], tree["case"], tree["file"]) == ("ao-77", "tp2-rowwise-v2048-gb2-b16", None)
    assert (
        tree["stated"]["tp"] and tree["assumed"]["dtype"] and tree["missing"] == {} and tree["reported"] == "2025-06-03"
    )
    assert not (project.folder / FILE).exists()


def test_stdin_is_read(project: Command) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "bug", "import", "-", "--id", "ours", "--dry-run"],
        input=REPORT,
        cwd=project.folder,
        env=project.environment_of_runs(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and 'recipe = "rowwise"' in done.stdout and done.stderr.startswith("ours: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope.md",), "cannot be read"),
        (("cases",), "cannot be read"),
        (("r.md", "--id", "../x"), "not an id of a bug"),
        (("r.md", "--link", "https://example.com"), "not a link of GitHub"),
        (("r.md", "--output", "x.toml"), "in a folder named bugs"),
        (("r.md", "--output", "bugs/x.txt"), "no file to write to"),
        (("r.md", "--version", "torch"), "--version torch=2.13.0"),
    ],
)
def test_bad_input_is_an_error_of_one_line(project: Command, words: tuple[str, ...], expected: str) -> None:
    (project.folder / "r.md").write_text(REPORT)
    done = project.call("bug", "import", *words)
    assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1
