"""Models of a user that are built in other ways than the Llama: clean runs are clean, and planted faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import Command

TARGETS = Path(__file__).parents[1] / "targets"
STYLED = "target.styled-tp2-tensorwise-tpstyle.fp8-v2048-s2-f64"
TIED = "target.tied-fsdp2-tensorwise-ag.fp8-head.fp8-v2048-s2-f64"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A project with these targets in it, run on the real ranks."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    for name in ("toy.py", "variants.py"):
        (folder / name).write_text((TARGETS / name).read_text())
    for name in ("Styled", "Tied"):
        (folder / f"{name.lower()}.py").write_text(f"from variants import {name} as build\n")
    return Command(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"})


def test_clean_runs_pass(project: Command) -> None:
    done = project.run("run", "--case", STYLED, "--case", TIED, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cases: 2 passed" in done.stdout


@pytest.mark.parametrize(
    ("case", "fault", "says"),
    [
        (STYLED, "gathered_input_has_local_scale", "blocks.0.up]: scale does not match the amax"),
        (STYLED, "fp8_tp_styles_lost", "no linear has a float8 TP style"),
        (TIED, "fp8_all_gather_flag_lost", "wrong number of casts: first in blocks.0.up"),
    ],
)
def test_a_planted_fault_is_found(project: Command, case: str, fault: str, says: str) -> None:
    done = project.run("run", "--case", case, "--inject", f"fault:{fault}", timeout_s=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout, done.stdout
