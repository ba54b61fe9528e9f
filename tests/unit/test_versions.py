"""Environments with other versions, which versions are releases, and the pins of one file or of a variant of it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from harness.cli.environments import constraints, exit_code_of
from harness.errors import HarnessError
from harness.running.environments import NotInstalled, Versions, is_release
from harness.sources import evidence_key, holds_for, installed_version, is_among, is_since, is_unreleased
from harness.verdict import Verdict
from tests.builders import make_result, make_results

RISING = (
    "2.14.1",
    "2.15.0.dev20260801",
    "2.15.0.dev20260802+cpu",
    "2.15.0a0+git12",
    "2.15.0rc1",
    "2.15.0",
    "2.15.0+cu130",
    "2.15.0.post1",
    "2.16.0.dev20261120+cpu",
)


@pytest.mark.parametrize("version", RISING)
def test_a_pre_release_is_older_than_its_release(version: str) -> None:
    at = RISING.index(version)
    assert [is_since(version, other) for other in RISING] == [True] * (at + 1) + [False] * (len(RISING) - at - 1)
    assert is_since(version, "2.15") is (at >= RISING.index("2.15.0"))


@pytest.mark.parametrize("version", ["", "unknown", "nightly"])
def test_what_is_no_version_has_nothing(version: str) -> None:
    assert not is_since(version, "0") and not is_unreleased(version) and evidence_key(version) == version
    assert is_among(version, ">=2.13") is False and is_among(version, "") is True


@pytest.mark.parametrize(
    ("version", "key", "unreleased"),
    [
        ("2.13.0", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0+cu130", "2.13.0", False),
        ("2.13.0.post1+cpu", "2.13.0.post1", False),
        ("2.13.0+git12", "2.13.0+git12", True),
        ("2.13.0a0+git12", "2.13.0a0+git12", True),
        ("2.16.0rc2", "2.16.0rc2", True),
        ("2.16.0.dev20261120+cpu", "2.16.0.dev20261120+cpu", True),
    ],
)
def test_evidence_is_of_a_release_or_of_exactly_one_build(version: str, key: str, unreleased: bool) -> None:
    assert (evidence_key(version), is_unreleased(version)) == (key, unreleased)
    made_with = {"torch": version, "torchao": "0.18.0", "numpy": "2.0.dev1"}
    assert holds_for({"torch": version}, made_with)
    assert holds_for({"torch": "2.99.0"}, made_with) is not unreleased


FIXED_IN_2_14, NEW_IN_2_15 = ">=2.13,<2.14", ">=2.15"


@pytest.mark.parametrize(
    ("version", "limits", "among"),
    [
        ("2.13.0", FIXED_IN_2_14, True),
        ("2.13.1.post2+cu130", FIXED_IN_2_14, True),
        ("2.13.0+git12", FIXED_IN_2_14, True),
        ("2.12.9", FIXED_IN_2_14, False),
        ("2.14.0", FIXED_IN_2_14, False),
        ("2.13.0.dev20260301", FIXED_IN_2_14, None),  # 2.12 has no such fault, 2.13.0 does
        ("2.13.0a0+git12", FIXED_IN_2_14, None),
        ("2.13.1rc1", FIXED_IN_2_14, True),  # 2.13.0 and 2.13.1 have it
        ("2.14.0.dev20260601+cpu", FIXED_IN_2_14, None),  # the last 2.13 has it, 2.14.0 does not
        ("2.14.1rc1", FIXED_IN_2_14, False),
        ("2.15.0.dev20260801", FIXED_IN_2_14, False),
        ("2.15.0.dev20260801", NEW_IN_2_15, None),
        ("2.15.0", NEW_IN_2_15, True),
        ("2.16.0.dev20261120", NEW_IN_2_15, True),
        ("2.14.1", NEW_IN_2_15, False),
        ("2.14.0.dev20260601", "==2.13.*", None),
        ("0.3.0.dev1", "==0.2.2", False),
        ("0.2.2.dev1", "==0.2.2", None),
        ("1.0.0.dev1", "<1", None),
        ("2.16.0.dev20261120", ">=2.16.0.dev20261110", True),  # limits that tell the night
        ("2.16.0.dev20261109", ">=2.16.0.dev20261110", False),
        ("2.13.0+cu130", "==2.13.0", True),
        ("2.13.0+cu130", "==2.13.0+cpu", False),
        ("2.13.0+cpu", "!=2.13.0+cpu", False),
    ],
)
def test_what_limits_say_of_a_build(version: str, limits: str, among: bool | None) -> None:
    assert is_among(version, limits) is among


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
