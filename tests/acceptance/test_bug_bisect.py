"""The environments of `fp8-harness bug bisect`, and the command over wheels in a folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.running.environments import NotInstalled, Source, python_with

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

PACKAGE = "fp8_harness_toy"
CASE = "single-tensorwise-v2048-s3-f32-tol.0.05"


def wheel(folder: Path, version: str, text: str = "") -> None:
    """A wheel of a package with one module."""
    info = f"{PACKAGE}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{PACKAGE}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{PACKAGE}.py", f"VERSION = {version!r}\n{text}")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_an_environment_has_its_version_and_everything_else(tmp_path: Path) -> None:
    wheel(tmp_path, "0.3")
    source = Source(find_links=tmp_path)
    python = python_with(PACKAGE, "0.3", source, tmp_path / "versions")
    code = f"import {PACKAGE}, harness, msgspec; print({PACKAGE}.VERSION, harness.__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["0.3", str(Path(sys.modules["harness"].__file__ or ""))]
    (tmp_path / f"{PACKAGE}-0.3-py3-none-any.whl").unlink()
    assert python_with(PACKAGE, "0.3", source, tmp_path / "versions") == python  # installed once
    with pytest.raises(NotInstalled, match=r"0\.4"):
        python_with(PACKAGE, "0.4", source, tmp_path / "versions")


def test_the_version_that_breaks_a_case_is_found(project: Command) -> None:
    wheels = project.folder / "wheels"
    wheels.mkdir()
    for version in ("0.1", "0.2", "0.3"):
        wheel(wheels, version, f"def apply(): assert VERSION < '0.3', 'version is not below {version}'\n")
    (project.folder / "broken.py").write_text(f"from {PACKAGE} import apply\n")
    words = ("bug", "bisect", CASE, "--package", PACKAGE, "--find-links", "wheels", "--inject", "broken.py:apply")
    done = project.call(*words, "--good", "0.1", "--bad", "0.3", "--json", "bisect.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the first version that fails: {PACKAGE} 0.3\n  good      0.2: no failure\n")
    wrong = project.call(*words, "--good", "0.2", "--bad", "0.1")
    assert wrong.returncode == 2 and "0.1 is good, not bad: no failure" in wrong.stderr
