"""The pins that are printed: all of one file, and in place of them those of a variant."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.cli.constraints import constraints
from harness.errors import HarnessError

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
