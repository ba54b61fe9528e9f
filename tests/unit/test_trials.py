"""Trials that Ctrl-C ends: an interruption as anywhere else, which the command line tells in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.bugs import trials
from harness.cli.main import main
from harness.running.plan import Plan
from harness.running.progress import SilentProgress
from harness.running.schedule import Ended
from harness.verdict import ExitCode
from tests.builders import make_case
from tests.jobs import make_capacity


def test_ctrl_c_ends_trials_as_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: Ended[Any] = Ended(results=(None,), interrupted=True)
    monkeypatch.setattr(trials, "run_schedule", lambda *args, **options: stopped)
    runner: Any = None
    plan = Plan(capacity=make_capacity(2))
    running = trials.Trials(plan, runner, SilentProgress())
    with pytest.raises(KeyboardInterrupt):
        running.run([make_case()])


def test_an_interruption_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "run_once", interrupted)
    monkeypatch.setenv("FP8_HARNESS_STATE", str(tmp_path))
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    assert main(["bug", "repro", "single-bf16-v2048-f32", "-q"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "fp8-harness: error: interrupted."
