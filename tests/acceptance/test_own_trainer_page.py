"""`docs/your-own-trainer.md`: every command in it is run, on real ranks, and does what the text says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.checks.loss_vs_golden import DISAGREE
from harness.checks.scales import RULES
from harness.checks.stated import SAVED
from tests.acceptance.conftest import REPOSITORY, Command
from tests.acceptance.documents import changed, steps
from tests.builders import sentence

DOCUMENT = (REPOSITORY / "docs" / "your-own-trainer.md").read_text()
SAYS = {
    "fp8-harness run --inject fault:amax_without_abs": (
        1,
        f"{RULES.amax.name}: {RULES.amax.says}: first for input in forward of 1 ",
    ),
    "fp8-harness run --inject fault:float8_weight_kept_for_backward": (
        1,
        sentence(SAVED, what="number of float8_e4m3fn bytes saved for backward", target="my_target"),
    ),
    "fp8-harness check-target my_target": (0, "my_target works under the harness. Not supported by it:"),
}

# What `fp8-harness run` says, every time that it stands in the document: exit code and words.
RUNS = [
    (1, sentence(DISAGREE, step=1)),
    (0, "1 case: 1 passed"),
    (0, "1 case: 1 passed"),
    (0, "1 case: 1 passed"),
    (0, "5 cases: 5 passed"),
]


@pytest.mark.sweep  # thirteen commands, ten of them with ranks
def test_the_document_is_what_happens(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    here, file, runs = tmp_path, tmp_path, list(RUNS)
    for kind, text in steps(DOCUMENT):
        if kind == "python":
            file = here / text.splitlines()[0].removeprefix("# ")
            file.write_text(text)
        elif kind == "diff":
            file.write_text(changed(file.read_text(), text))
        elif text.startswith("cd "):
            here = (here / text.removeprefix("cd ")).resolve()
        else:
            code, words = runs.pop(0) if text == "fp8-harness run" else (0, "")
            code, words = SAYS.get(text, (code, words))
            done = Command(here, {"FP8_HARNESS_STATE": str(tmp_path / "state")}).shell(text)
            assert done.returncode == code, f"{text}\n{done.stdout}{done.stderr}"
            assert words in done.stdout, done.stdout
            assert "cannot be judged" not in done.stdout
    assert runs == [], "the document lost a command"
