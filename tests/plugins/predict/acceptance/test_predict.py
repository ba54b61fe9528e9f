"""`fp8-harness predict cost` and `predict measure`: what a step costs, and whether FP8 pays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CASE = "fsdp2-rowwise-v2048-s3-b16-tol.0.05"


def test_mfu_of_a_published_speed(shared: Command) -> None:
    model = ("--model", "llama3-8b", "--recipe", "tensorwise", "--dp-shard", "8")
    done = shared.call("predict", "cost", *model, "--machine", "h100", "--tokens-per-s", "7773", "--json", "-")
    assert done.returncode == 0, done.stderr
    prediction = json.loads(done.stdout)
    assert prediction["formula"]["case_id"].startswith("fsdp8-tensorwise-dim.4096-layers.32-")
    assert prediction["speed"]["tflops"] == pytest.approx(450.169, abs=1e-3)
    assert prediction["speed"]["mfu_weighted"] == pytest.approx(0.2905, abs=1e-4)


def test_a_case_with_another_layout(shared: Command) -> None:
    done = shared.call("predict", "cost", CASE, "--tp", "2", "--rank", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fsdp2-tp2-rowwise-v2048-s3-b16-tol.0.05\nrank 3 of 4, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no case. Fix: give CASE-ID, or --model NAME."),
        ((CASE, "--model", "llama3-8b"), f"there are both {CASE} and --model llama3-8b."),
        (("--model", "gpt2"), "there is no model 'gpt2'. Fix: give one of debugmodel, llama3-8b, "),
        (("--model", "llama3-8b", "--tokens", "100"), "100 tokens of a rank are not whole sequences of 8192."),
        (("--model", "llama3-8b", "--tp", "3"), "rule heads_divide_tp excludes "),
        (
            ("--model", "llama3-8b", "--machine", "h20"),
            "the peaks of machine 'h20' are not known. Fix: give one of h100, ",
        ),
        ((CASE, "--run", "--tokens-per-s", "5"), "--run measures the speed."),
        ((CASE, "--rank", "2"), "the case has ranks 0 to 1."),
    ],
)
def test_what_cannot_be_answered(shared: Command, words: tuple[str, ...], message: str) -> None:
    done = shared.call("predict", "cost", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_speed_is_stored_where_history_and_gate_read(project: Command) -> None:
    done = project.call(
        "predict", "measure", CASE, "--pairs", "3", "--steps", "2", "--warmup", "1", "--json", "speed.json"
    )
    assert done.returncode == 0, done.stderr
    assert "times as fast as fsdp2-bf16-v2048-s3-b16-tol.0.05" in done.stdout and "simulated, not gated" in done.stdout
    ran = [line.split()[-1].split("-")[1] for line in done.stderr.splitlines() if "passed" in line]
    assert ran == ["bf16", "rowwise", "rowwise", "bf16", "bf16", "rowwise"]  # in turns
    measurement = json.loads((project.folder / "speed.json").read_text())
    assert len(measurement["cases"][0]["pairs"]) == 3 and measurement["gated"] is False
    assert "speed" in project.call("runs", "history", CASE).stdout
    assert "times as fast as fsdp2-bf16" in project.call("show", CASE).stdout
    gate = project.call("compare", "speed", "speed")
    assert gate.returncode == 0 and gate.stdout.startswith("GO"), gate.stdout + gate.stderr


def test_a_job_that_fails_ends_its_case(project: Command) -> None:
    done = project.call(
        "predict", "measure", "single-tensorwise-v2048-s3-seed1-f32-tol.0.05", "--pairs", "3", "--device", "cpu"
    )
    assert done.returncode == 1
    assert "not timed: single-tensorwise" in done.stdout and "crashed" in done.stdout
