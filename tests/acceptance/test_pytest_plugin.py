"""Cases as pytest items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

PLUGIN = ("--fp8-device", "cpu")  # loaded by its entry point, as for every user


def test_cases_folder(project: Command) -> None:
    done = project.pytest(*PLUGIN, "cases/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_tier_alone(project: Command) -> None:
    (project.folder / "test_other.py").write_text("def test_other():\n    assert False\n")
    done = project.pytest(*PLUGIN, "--fp8-tier", "smoke", "-k", "tensorwise", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases/smoke.toml::single-tensorwise" in done.stdout
    assert "1 passed" in done.stdout


def test_not_asked_for(project: Command) -> None:
    (project.folder / "test_other.py").write_text("def test_other():\n    pass\n")
    done = project.pytest(*PLUGIN)
    assert "1 passed" in done.stdout


def test_failure_shows_findings(project: Command, tmp_path: Path) -> None:
    project.planted("bad", 1)
    done = project.pytest(*PLUGIN, "cases/bad.toml", "--junitxml", str(tmp_path / "junit.xml"))
    assert done.returncode == 1
    assert "planted failure" in done.stdout
    assert " fp8-harness run --case" in done.stdout
    assert len(ElementTree.parse(tmp_path / "junit.xml").findall(".//failure")) == 1


def test_bad_file_is_a_collection_error(project: Command) -> None:
    project.tier("bad", "[base\n")
    done = project.pytest(*PLUGIN, "cases/")
    assert done.returncode == 2
    assert "bad.toml:1" in done.stdout


def test_unknown_tier(project: Command) -> None:
    done = project.pytest(*PLUGIN, "--fp8-tier", "smok")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "did you mean smoke" in done.stderr


def test_several_workers(project: Command) -> None:
    done = project.pytest(*PLUGIN, "--fp8-tier", "smoke", "-n", "2", "--fp8-slots", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
