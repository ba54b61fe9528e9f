"""Pages that are walked: every command in them is run, one after another, and does what the text says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from harness.checks.loss_vs_golden import DISAGREE
from harness.checks.scales import RULES
from harness.checks.stated import SAVED
from harness.verdict import Verdict
from tests.acceptance.conftest import REPOSITORY, Command
from tests.acceptance.documents import changed, steps
from tests.builders import sentence

# What a command says, every time that it stands in the page: exit code and words. Others only have to work.
Says = Mapping[str, list[tuple[int, str]]]
Run = Callable[[Path, str], "subprocess.CompletedProcess[str]"]
PASSED = (0, "1 case: 1 passed")
WRONG_SCALE = f"{RULES.amax.name}: {RULES.amax.says}: first for input in forward of "


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def walk(document: str, here: Path, says: Says, run: Run, *, file: str = "") -> None:
    """Follow a page from a folder: its files, changes of the last file or of `file`, and commands."""
    path, left = here / file, {text: list(told) for text, told in says.items()}
    for kind, text in steps(document):
        if kind == "python":
            path = here / text.splitlines()[0].removeprefix("# ")
            path.write_text(text)
        elif kind == "diff":
            path.write_text(changed(path.read_text(), text))
        elif text.startswith("cd "):
            here = (here / text.removeprefix("cd ")).resolve()
            path = here / file if file else path
        elif text.startswith("make "):
            subprocess.run(["make", "-n", *text.split()[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif text.startswith(". "):
            assert f"VENV := {text.split()[1].partition('/')[0]}\n" in (REPOSITORY / "Makefile").read_text()
        else:
            code, words = left[text].pop(0) if left.get(text) else (0, "")
            done = run(here, text)
            assert done.returncode == code, f"{text}\n{done.stdout}{done.stderr}"
            assert words in done.stdout, f"{text}\n{done.stdout}"
    assert not any(left.values()), "the page lost a command"


def with_examples(folder: Path) -> Run:
    """How commands are run in a folder that has the examples and a state of its own."""
    shutil.copytree(REPOSITORY / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    state = {"FP8_HARNESS_STATE": str(folder / "state")}
    return lambda here, text: Command(here, state).shell(text, timeout_s=600)


@pytest.mark.sweep  # seven runs of the command, five of them with ranks
def test_first_case(tmp_path: Path) -> None:
    for name in ("cases", "golden"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    document, fails = page("first-case.md"), "fp8-harness run my.toml --inject wrong_scale.py:apply"

    def run(here: Path, text: str) -> subprocess.CompletedProcess[str]:
        done = Command(here).shell(text)
        assert text != fails or all(number in done.stdout for number in re.findall(r"\d+\.\d{6,}", document))
        return done

    says = {
        "fp8-harness run my.toml": [PASSED],
        fails: [(1, f"{WRONG_SCALE}layers.0.attention.wq")],
        "fp8-harness run --lf --inject mended.py:apply": [PASSED],
        "fp8-harness explain --ids": [(0, "out of scope")],
        "fp8-harness baseline check my": [(0, "0 damaged, 0 missing")],
    }
    walk(document, tmp_path, says, run)


@pytest.mark.sweep  # thirteen commands, ten of them with ranks
def test_your_own_trainer(tmp_path: Path) -> None:
    shell = with_examples(tmp_path)

    def run(here: Path, text: str) -> subprocess.CompletedProcess[str]:
        done = shell(here, text)
        assert "cannot be judged" not in done.stdout
        return done

    kept = sentence(SAVED, what="number of float8_e4m3fn bytes saved for backward", target="my_target")
    says = {
        "fp8-harness run --inject fault:amax_without_abs": [(1, f"{WRONG_SCALE}1 ")],
        "fp8-harness run --inject fault:float8_weight_kept_for_backward": [(1, kept)],
        "fp8-harness check-target my_target": [(0, "my_target works under the harness. Not supported by it:")],
        "fp8-harness run": [(1, sentence(DISAGREE, step=1)), *[PASSED] * 3, (0, "5 cases: 5 passed")],
    }
    walk(page("your-own-trainer.md"), tmp_path, says, run)


@pytest.mark.sweep
def test_from_report_to_case(tmp_path: Path) -> None:
    live = "fsdp2-tp2-tensorwise-ag.fp8-ac.full-v2048-s2-f64"
    add = "fp8-harness bug import ../examples/report.md"
    shrink = f"fp8-harness bug shrink {live} --json shrunk.json --output small.toml"
    listed = "fsdp2-tp2-rowwise-ac.full-graph-kvheads.4-v2048-gb4-s12-b16"
    says = {
        add: [(0, "wrote cases/bugs/your-model-7.toml")],
        f"{add} --date 2026-05-01 --dry-run": [(0, 'title = "float8 loss is NaN with TP and FSDP2"')],
        f"{add} --id full-size --full-size": [(0, "dim = 4096")],
        "fp8-harness bug list": [(0, "2 bugs: 2 open")],
        "fp8-harness bug repro your-model-7": [(0, "not reproduced: fsdp2-tp2-rowwise-ac.full-graph")],
        f"fp8-harness bug repro {live}": [(1, f"found     {RULES.amax.name}")],
        shrink: [(0, "smallest case: fsdp2-tp2")],
        "fp8-harness list cases/bugs/your-model-7.toml": [(0, listed)],
    }
    run = with_examples(tmp_path)
    walk(page("from-report-to-case.md"), tmp_path, says, run, file="cases/bugs/your-model-7.toml")


def test_reading_a_report(project: Command) -> None:
    document = page("reading-a-report.md")
    says = {
        "fp8-harness show": [(0, "4 cases: 4 passed")],
        "fp8-harness show single-tensorwise": [(0, "passed; 1 rank")],
        "fp8-harness show first single-tensorwise": [(0, "passed; 1 rank")],
    }
    walk(document, project.folder, says, lambda _, text: project.printed(text))
    assert all((project.folder / name).stat().st_size for name in ("report.html", "summary.md", "junit.xml"))
    script = (REPOSITORY / "harness" / "report" / "html" / "assets" / "page.js").read_text()
    rows = re.findall(r"^\| (\S) \| (\w+) \| (.+) \|$", document, flags=re.MULTILINE)
    assert {name: phrase for _, name, phrase in rows} == {each.value: each.phrase for each in Verdict}
    assert all(f'{name}: "{mark}"' in script for mark, name, _ in rows), "the marks are those of the page"
