"""Environments with other versions, which versions are releases, and the pins of one file or of a variant of it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from harness.cli.environments import constraints, exit_code_of
from harness.errors import HarnessError
from harness.running.environments import NotInstalled, Versions, is_release
from harness.sources import installed_version
from harness.verdict import Verdict
from tests.builders import make_result, make_results

pytestmark = pytest.mark.programs

FAKE_UV = """#!/bin/sh
echo "$@" > "{asked}"
echo "Resolved 3 packages"
echo "Downloading torch (888.1MiB)"
echo "Installed 3 packages in 2s"
echo "  x no solution found" >&2
exit {code}
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the uv that is found was called with."""
    put_uv(tmp_path, code=0)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path / "asked"


def put_uv(folder: Path, *, code: int) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "uv").write_text(FAKE_UV.format(asked=folder / "asked", code=code))
    (folder / "bin" / "uv").chmod(0o755)


@pytest.mark.parametrize(
    ("installed", "version", "same"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13", True),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("2.13.0+git12", "2.13.0", False),
        ("2.13.0a0+git12", "2.13.0", False),
        ("2.13.1", "2.13.0", False),
        ("", "2.13.0", False),
        ("2.13.0", "nightly", False),
    ],
)
def test_which_version_is_a_release(installed: str, version: str, same: bool) -> None:
    assert is_release(installed, version) is same


def test_the_version_that_runs_needs_no_environment(tmp_path: Path) -> None:
    version = installed_version("msgspec") or ""
    place = Versions("msgspec", tmp_path / "versions").environment(version)
    assert (place.name, place.python, place.folder) == (f"msgspec-{version}", Path(sys.executable), None)
    assert not (tmp_path / "versions").exists()


def test_torch_comes_with_its_libraries_and_nothing_else_changes(tmp_path: Path, asked: Path) -> None:
    notes: list[str] = []
    url = "https://example.org/cpu"
    made = Versions("torch", tmp_path / "versions", index=url, note=notes.append).environment("2.99.0")
    words = asked.read_text().split()
    assert words[-3:] == ["--index-url", "https://example.org/cpu", "torch==2.99.0"] and "--no-deps" not in words
    held = Path(words[words.index("--constraint") + 1]).read_text().splitlines()
    assert f"msgspec=={installed_version('msgspec')}" in held
    assert not any(line.startswith(("torch==", "triton==", "nvidia-")) for line in held)
    assert notes[0] == f"torch 2.99.0: installing it into {made.folder}, which is kept"
    assert "  Downloading torch (888.1MiB)" in notes and "  Installed 3 packages in 2s" in notes


def test_any_other_package_comes_alone(tmp_path: Path, asked: Path) -> None:
    Versions("torchao", tmp_path / "versions").environment("0.99.0")
    assert "--no-deps" in asked.read_text().split() and "--constraint" not in asked.read_text()


def test_without_uv_it_is_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    notes: list[str] = []
    versions = Versions("no-such-package", tmp_path / "versions", index=str(tmp_path), note=notes.append)
    with pytest.raises(NotInstalled, match="No matching distribution found for no-such-package==1"):
        versions.environment("1")
    assert any("Looking in links" in line for line in notes)


def test_what_cannot_be_installed_leaves_nothing(tmp_path: Path, asked: Path) -> None:
    put_uv(tmp_path, code=1)
    versions = Versions("torch", tmp_path / "versions")
    with pytest.raises(NotInstalled, match="no solution found"):
        versions.environment("2.99.0")
    assert asked.exists() and not (tmp_path / "versions" / "torch-2.99.0").exists()
    put_uv(tmp_path, code=0)
    assert versions.environment("2.99.0").python.exists()


GOOD, BAD, MACHINE, OTHER = Verdict.PASSED, Verdict.NUMERIC, Verdict.INFRA, Verdict.CHANGED


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [((GOOD, OTHER), 5), ((OTHER, MACHINE), 4), ((OTHER, BAD), 1), ((GOOD, GOOD), 0)],
)
def test_the_worst_run_decides_the_exit_code(verdicts: tuple[Verdict, Verdict], worst: int) -> None:
    runs = {verdict.name + str(at): make_results(make_result("a", verdict)) for at, verdict in enumerate(verdicts)}
    assert exit_code_of(runs) == worst


ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "constraints.txt").write_text("# verified together\nJinja2==3.1.6\ntorch==2.13.0\ntorchao==0.18.0\n")
    (tmp_path / "constraints-new.txt").write_text("# of a night\ntorch==2.15.0\njinja2==3.2\nextra_package==1\n")
    return tmp_path


def test_a_variant_replaces_pins_by_package(folder: Path) -> None:
    assert constraints(folder, None).splitlines() == [
        "# fp8-harness constraints",
        "Jinja2==3.1.6",
        "torch==2.13.0",
        "torchao==0.18.0",
    ]
    assert constraints(folder, "new").splitlines()[1:] == [
        "jinja2==3.2",
        "torch==2.15.0",
        "torchao==0.18.0",
        "extra_package==1",
    ]


def test_a_variant_that_is_not_there_is_named_with_those_that_are(folder: Path) -> None:
    with pytest.raises(HarnessError, match=r"--for old: no versions of this name.*use one of new"):
        constraints(folder, "old")


def test_the_wheel_has_every_file_of_pins() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    pins = {f"ci/{path.name}": f"harness/_project/ci/{path.name}" for path in (ROOT / "ci").glob("constraints*.txt")}
    assert build["force-include"] == {"cases": "harness/_project/cases", "golden": "harness/_project/golden"} | pins
