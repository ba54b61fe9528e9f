"""`docs/from-report-to-case.md`: every command in it is run, and does what the text says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.checks.scales import RULES
from tests.acceptance.conftest import REPOSITORY, Command
from tests.acceptance.documents import changed, steps

LIVE = "fsdp2-tp2-tensorwise-ag.fp8-ac.full-v2048-s2-f64"
DOCUMENT = (REPOSITORY / "docs" / "from-report-to-case.md").read_text()
IMPORT = "fp8-harness bug import ../examples/report.md"
SAYS = {
    IMPORT: "wrote cases/bugs/your-model-7.toml",
    f"{IMPORT} --date 2026-05-01 --dry-run": 'title = "float8 loss is NaN with TP and FSDP2"',
    f"{IMPORT} --id full-size --full-size": "dim = 4096",
    "fp8-harness bug list": "2 bugs: 2 open",
    "fp8-harness bug repro your-model-7": "not reproduced: fsdp2-tp2-rowwise-ac.full-graph",
    f"fp8-harness bug repro {LIVE}": f"found     {RULES.amax.name}",
    f"fp8-harness bug shrink {LIVE} --json shrunk.json --output small.toml": "smallest case: fsdp2-tp2",
    "fp8-harness list cases/bugs/your-model-7.toml": "fsdp2-tp2-rowwise-ac.full-graph-kvheads.4-v2048-gb4-s12-b16",
}

FAILS = {f"fp8-harness bug repro {LIVE}": 1}


@pytest.mark.sweep
def test_the_document_is_what_happens(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    here, said = tmp_path, set()
    for kind, text in steps(DOCUMENT):
        if kind == "diff":
            file = here / "cases" / "bugs" / "your-model-7.toml"
            file.write_text(changed(file.read_text(), text))
        elif text.startswith("cd "):
            here = here / text.removeprefix("cd ")
        else:
            done = Command(here, {"FP8_HARNESS_STATE": str(tmp_path / "state")}).shell(
                text, timeout_s=600
            )  # compiles on four ranks
            assert done.returncode == FAILS.get(text, 0), f"{text}\n{done.stdout}{done.stderr}"
            assert SAYS.get(text, "") in done.stdout, done.stdout
            said.add(text)
    assert set(SAYS) <= said, "the document lost a command"
