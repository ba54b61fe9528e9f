"""The pages of the site: every command in them is run, or at least understood, and the site has no broken link."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.acceptance.conftest import CASES, REPOSITORY, Command
from tests.acceptance.documents import steps
from tests.commands import understood

DOCS = REPOSITORY / "docs"
# Pages whose commands have a test of their own.
WALKED = {"on-your-gpus.md", "first-case.md", "your-own-trainer.md", "from-report-to-case.md", "reading-a-report.md"}
HERE = ("index.md", "concepts.md", "tolerances.md", "ci.md", "release.md", "versions.md", "performance.md")
ELSEWHERE = ("on-a-cluster.md",)  # commands that need a cluster: understood, and run by tests of their own
BY_NIGHT = ("first-case.md", "your-own-trainer.md", "from-report-to-case.md")  # walked by tests with the mark `sweep`

# Commands that are understood only, and why they are not run here.
NOT_RUN = {
    "fp8-harness run single-tensorwise-v2048-s3-f32 --inject fault:amax_without_abs": "run below, with torch",
    "fp8-harness baseline tolerance --measure pr --seeds 8": "takes minutes",
    "fp8-harness run nightly --device cuda --select dtype=bfloat16": "needs GPUs",
    "fp8-harness run nightly --device cuda --arithmetic exact --select dtype=float64": "needs GPUs",
    "fp8-harness compare --versions torchao=0.17.0,0.18.0 pr": "makes environments from a package index",
    "fp8-harness compare --versions torch=2.13.0,2.15.0 pr": "makes environments from a package index",
    "fp8-harness compare --versions torch=2.13.0,nightly --env nightly=.venv-nightly pr": "needs an environment",
    "fp8-harness compare --versions torch=2.13.0,2.15.0 --env 2.15.0=.venv-torch-2.15 pr": "needs an environment",
    'fp8-harness baseline update --only-failing --reason "torch 2.14 changed AdamW"': "run where a loss is off",
    "fp8-harness baseline show --against HEAD": "run in a git repository",
}


def commands(page: str) -> list[str]:
    return [text for kind, text in steps((DOCS / page).read_text()) if kind == "sh"]


def add_tolerances(folder: Path) -> None:
    shutil.copytree(REPOSITORY / "golden" / "evidence", folder / "evidence", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "golden" / "tolerances.toml", folder)


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page_work(project: Command, page: str) -> None:
    project.tier("pr", CASES)
    add_tolerances(project.folder / "golden")
    for text in commands(page):
        if text.startswith("fp8-harness"):
            understood(text)
        if text in NOT_RUN:
            continue
        done = project.printed(f"{text} -p no:cacheprovider" if text.startswith("pytest") else text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


def test_the_fault_of_the_first_page_is_found(tmp_path: Path) -> None:
    """With torch, in a project without goldens: scales are judged all the same."""
    (tmp_path / "cases").mkdir()
    add_tolerances(tmp_path / "golden")
    (text,) = [text for text in commands("index.md") if "--inject" in text]
    done = Command(tmp_path).shell(text)
    assert done.returncode == 1 and "of layers.0.attention.wq at step 1 on rank 0" in done.stdout, done.stdout


@pytest.mark.parametrize("page", (*ELSEWHERE, *BY_NIGHT))
def test_the_commands_of_a_page_are_understood(page: str) -> None:
    found = [text for text in commands(page) if text.startswith("fp8-harness")]
    assert found
    for text in found:
        understood(text)


def test_every_page_with_commands_has_a_test() -> None:
    assert {path.name for path in DOCS.glob("*.md") if commands(path.name)} == WALKED | set(HERE) | set(ELSEWHERE)
    assert {text for page in HERE for text in commands(page)} >= set(NOT_RUN), "no page has this command any more"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_commands_in_a_line_are_understood(path: Path) -> None:
    """Those between backticks that have an option; words in capitals stand for something."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for text in re.findall(r"`(fp8-harness [^`]+)`", prose):
        if re.search(r" --\w", text) and "…" not in text:
            understood(text)


def test_the_site_has_no_broken_link_and_no_page_outside_of_it(tmp_path: Path) -> None:
    site = ["--config-file", str(REPOSITORY / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *site],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = [path.read_text() for path in (tmp_path / "site").glob("*.html")]
    assert len(pages) > 8
    assert not [each for page in pages for each in re.findall(r'(?:src|href)="(https?://[^"]*\.(?:js|css))', page)]


def test_make_docs_renders_the_site() -> None:
    done = subprocess.run(
        ["make", "-n", "docs"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert "mkdocs build --strict" in done.stdout
    assert yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["docs_dir"] == "docs"
