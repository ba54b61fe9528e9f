"""Outside of any project, with an installed package: its own cases run, and nothing is written into it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import REPOSITORY, Command

GOLDEN = ("baseline", "update", "single-bf16-v2048-s3-b16", "--device", "cpu", "--reason", "first")


@pytest.fixture
def installed(tmp_path: Path, shared: Command) -> Iterator[Command]:
    """An empty folder, and a copy of the package as a wheel installs it: with a project inside."""
    package = tmp_path / "site" / "harness"
    shutil.copytree(REPOSITORY / "harness", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cases", "golden"):
        shutil.copytree(shared.folder / name, package / "_project" / name)
    here = tmp_path / "here"
    here.mkdir()
    yield Command(here, {"PYTHONPATH": f"{package.parent}:{REPOSITORY}"})


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.suffix in (".json", ".toml")}


def test_what_is_stored_needs_a_project(installed: Command) -> None:
    shipped = installed.folder.parent / "site" / "harness" / "_project"
    before = files(shipped)
    commands = (
        GOLDEN,
        ("baseline", "tolerance", "--measure", "smoke"),
        ("dev", "tier", "smoke"),
        ("dev", "tier", "--fit", str(shipped / "cases" / "smoke.toml")),
    )
    for command in commands:
        done = installed.run(*command)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "nothing is stored in an installed package" in done.stderr and str(installed.folder) in done.stderr
    assert files(shipped) == before
    assert installed.run(*GOLDEN, "--dry-run").returncode == 0
    assert files(shipped) == before


def test_the_fix_makes_a_project_in_which_it_is_stored(installed: Command) -> None:
    fix = installed.run(*GOLDEN).stderr.split("`")[1]
    assert installed.shell(fix).returncode == 0
    done = installed.run(*GOLDEN)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = files(installed.folder)
    assert path.is_relative_to(installed.folder / "golden") and f"stored in {path}" in done.stdout


def test_a_run_does_not_suggest_to_store_goldens_there(installed: Command) -> None:
    case = '[[case]]\naxes = {recipe = "rowwise", steps = 4, loss_tolerance = 0.1}\n'
    (installed.folder / "my.toml").write_text(case)
    done = installed.run("run", "my.toml", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 golden not stored: " in done.stderr and "To store them" not in done.stderr
