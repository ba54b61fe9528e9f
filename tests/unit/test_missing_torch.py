"""Without torch, a command that starts ranks is one line that says what to install; the others work."""

import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.project import Project

pytestmark = pytest.mark.programs

CASE = "tp2-rowwise-v2048-f32"
NEEDS_RANKS = (
    ("run", CASE),
    ("baseline", "update", CASE, "--reason", "x"),
    ("baseline", "tolerance", "--measure", CASE),
    ("dev", "mutate", "--fault", "amax_without_abs"),
    ("dev", "conformance"),
)


@pytest.fixture(autouse=True)
def without_torch(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("FP8_HARNESS_STATE", str(project.state))
    monkeypatch.delenv("FP8_HARNESS_PROGRAM", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed


@pytest.mark.parametrize("arguments", NEEDS_RANKS, ids=" ".join)
def test_what_to_install_is_one_line(arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.err == (
        "fp8-harness: error: torch is not installed, and ranks cannot train without. "
        "Fix: `pip install --extra-index-url https://download.pytorch.org/whl/cpu 'fp8-harness[train]'`; without the "
        "index, pip takes torch's build for CUDA, of several GB.\n"
    )
    assert not Path("state").exists()


def test_both_are_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert main(NEEDS_RANKS[0]) == 2
    assert "torch and torchao are not installed" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [("explain", CASE), ("list", CASE), ("new", "--id"), ("--version",)])
def test_what_needs_no_ranks_works(arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0, capfd.readouterr().err


def test_a_rank_program_of_ones_own_may_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.running.plan import make_plan

    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "my.ranks")
    assert make_plan(device="cpu").program == "my.ranks"
