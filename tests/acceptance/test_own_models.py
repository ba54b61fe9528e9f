"""Models of a user that are built in other ways than the Llama: clean runs are clean, and planted faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import Command

TARGETS = Path(__file__).parents[1] / "targets"
STYLED = "target.styled-tp2-tensorwise-tpstyle.fp8-v2048-s2-f64"
REDUCED = "target.synchronizing-hsdp2x2-tensorwise-v2048-s3-reduce.b16-b16"
ACCUMULATED = "target.accumulating-fsdp2-tensorwise-v2048-s3-f32"
EVALUATED = "target.toy-fsdp2-tensorwise-v2048-s3-eval-f64"
RESUMED = "target.toy-fsdp2-tp2-tensorwise-v2048-s3-resume.resharded-b16"
TIED = "target.tied-fsdp2-tensorwise-ag.fp8-head.fp8-v2048-s2-f64"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A project with these targets in it, run on the real ranks."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    for name in ("toy.py", "variants.py"):
        (folder / name).write_text((TARGETS / name).read_text())
    for name in ("Styled", "Tied", "Accumulating", "Synchronizing"):
        (folder / f"{name.lower()}.py").write_text(f"from variants import {name} as build\n")
    return Command(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"})


def test_clean_runs_pass(project: Command) -> None:
    cases = (STYLED, TIED, ACCUMULATED, REDUCED, EVALUATED, RESUMED)
    done = project.run("run", *(word for case in cases for word in ("--case", case)), timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases: 6 passed" in done.stdout


@pytest.mark.parametrize(
    ("case", "fault", "says"),
    [
        (STYLED, "gathered_input_has_local_scale", "module blocks.0.up]: local tensor was cast instead of its DTensor"),
        (STYLED, "fp8_tp_styles_lost", "no linear has a float8 TP style"),
        (REDUCED, "gradients_reduced_in_another_dtype", "gradients are reduced in float32 instead of bfloat16"),
        (ACCUMULATED, "one_row_of_a_gradient_scaled", "1e-08 allowed"),
        (EVALUATED, "old_weight_in_evaluation", "the loss of the evaluation is not that of training on the same batch"),
        (EVALUATED, "evaluation_mode_left_on", "leaves torch's training mode changed after the evaluation of step 1"),
        (
            RESUMED,
            "optimizer_state_not_loaded",
            "the state that fsdp4 loaded is not the one that was saved: exp_avg of",
        ),
        (TIED, "fp8_all_gather_flag_lost", "wrong number of casts: first in blocks.0.down"),
    ],
)
def test_a_planted_fault_is_found(project: Command, case: str, fault: str, says: str) -> None:
    done = project.run("run", "--case", case, "--inject", f"fault:{fault}", timeout_s=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout, done.stdout


def test_a_fault_of_torchao_is_known_in_a_project_without_records(project: Command) -> None:
    done = project.run("run", "--case", "target.tied-fsdp2-tp2-tensorwise-ag.fp8-head.fp8-v2048-s2-f64", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 case: 1 known" in done.stdout
    assert "known fault fp8-all-gather-scale-per-tp-rank: FSDP2 x TP with the float8 all-gather" in done.stdout
