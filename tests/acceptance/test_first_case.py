"""`docs/first-case.md`: every command in it is run, on real ranks, and does what the text says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.checks.scales import RULES
from tests.acceptance.conftest import REPOSITORY, Command
from tests.acceptance.documents import steps

DOCUMENT = (REPOSITORY / "docs" / "first-case.md").read_text()
FAILS = "fp8-harness run my.toml --inject wrong_scale.py:apply"
SAYS = {
    "fp8-harness run my.toml": "1 case: 1 passed",
    FAILS: f"{RULES.amax.name}: {RULES.amax.says}: first for input in forward of layers.0.attention.wq",
    "fp8-harness run --lf --inject mended.py:apply": "1 case: 1 passed",
    "fp8-harness explain --ids": "out of scope",
    "fp8-harness baseline check my": "0 damaged, 0 missing",
}


@pytest.mark.sweep  # seven runs of the command, five of them with ranks
def test_the_document_is_what_happens(tmp_path: Path) -> None:
    for name in ("cases", "golden"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    user, said = Command(tmp_path), dict(SAYS)
    for kind, text in steps(DOCUMENT):
        if kind == "python":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif text.startswith("make "):
            subprocess.run(["make", "-n", *text.split()[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif text.startswith(". "):
            assert f"VENV := {text.split()[1].partition('/')[0]}\n" in (REPOSITORY / "Makefile").read_text()
        else:
            done = user.shell(text)
            assert done.returncode == (1 if text == FAILS else 0), f"{text}\n{done.stdout}{done.stderr}"
            assert said.pop(text, "") in done.stdout
            assert text != FAILS or all(number in done.stdout for number in re.findall(r"\d+\.\d{6,}", DOCUMENT))
    assert said == {}, "the document lost a command"
