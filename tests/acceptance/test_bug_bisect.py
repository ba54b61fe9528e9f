"""The environments of `fp8-harness bug bisect`, and the command over wheels in a folder."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.running.versions import NotInstalled, Source, Versions

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

PACKAGE = "fp8_harness_toy"
CASE = "single-tensorwise-v2048-s3-f32-tol.0.05"


def wheel(folder: Path, version: str, text: str = "", package: str = PACKAGE) -> None:
    """A wheel of a package with one module."""
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{package}.py", f"VERSION = {version!r}\n{text}")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def environment(folder: Path, version: str, text: str = "", package: str = PACKAGE) -> Path:
    """A virtual environment with this version of the module, and no harness. Its wheel is in the same folder."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheel(folder, version, text, package)
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl") as file:
        file.extractall(packages)
    return folder


def test_an_environment_has_its_version_and_everything_else(tmp_path: Path) -> None:
    wheel(tmp_path, "0.3")
    told: list[str] = []
    versions = Versions(PACKAGE, tmp_path / "versions", source=Source(find_links=tmp_path), note=told.append)
    made = versions.environment("0.3")
    code = f"import {PACKAGE}, harness, msgspec; print({PACKAGE}.VERSION, harness.__file__)"
    done = subprocess.run([made.python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["0.3", str(Path(sys.modules["harness"].__file__ or ""))]
    assert told[0] == f"{PACKAGE} 0.3: installing it into {made.folder}, which is kept" and "KiB in" in told[-1]
    (tmp_path / f"{PACKAGE}-0.3-py3-none-any.whl").unlink()
    assert versions.environment("0.3") == made and sum("installing it" in line for line in told) == 1
    with pytest.raises(NotInstalled, match=r"0\.4"):
        versions.environment("0.4")
    assert not (tmp_path / "versions" / f"{PACKAGE}-0.4").exists()


def test_the_version_that_breaks_a_case_is_found(project: Command) -> None:
    wheels = project.folder / "wheels"
    wheels.mkdir()
    for version in ("0.1", "0.2", "0.3"):
        wheel(wheels, version, f"def apply(): assert VERSION < '0.3', 'version is not below {version}'\n")
    (project.folder / "broken.py").write_text(f"from {PACKAGE} import apply\n")
    (wheels / f"{PACKAGE}-0.2-py3-none-any.whl").write_text("not read: --env has this version")
    environment(project.folder / "mine", "0.2", "def apply(): assert VERSION < '0.3'\n")
    words = ("bug", "bisect", CASE, "--package", PACKAGE, "--find-links", "wheels", "--inject", "broken.py:apply")
    words = (*words, "--env", "0.2=mine")
    done = project.call(*words, "--good", "0.1", "--bad", "0.3", "--json", "bisect.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the first version that fails: {PACKAGE} 0.3\n  good   0.2: no failure\n")
    wrong = project.call(*words, "--good", "0.2", "--bad", "0.1")
    assert wrong.returncode == 2 and "0.1 is good, not bad: no failure" in wrong.stderr


def test_the_version_that_runs_is_used_as_it_is(project: Command) -> None:
    here = metadata.version("iniconfig")
    wheels = project.folder / "wheels"
    wheels.mkdir()
    wheel(wheels, "0.0", package="iniconfig")
    (wheels / f"iniconfig-{here}-py3-none-any.whl").write_text("not read: this version runs")
    (project.folder / "broken.py").write_text(
        "def apply():\n    import iniconfig\n    assert hasattr(iniconfig, 'VERSION')\n"
    )
    words = ("--package", "iniconfig", "--find-links", "wheels", "--inject", "broken.py:apply")
    done = project.call("bug", "bisect", CASE, *words, "--good", "0.0", "--bad", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the first version that fails: iniconfig {here}\n  good   0.0: no failure\n")
    assert "broken.py:apply raised AssertionError" in " ".join(done.stdout.split())
