"""`fp8-harness metrics`: what a step costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CASE = "fsdp2-rowwise-v2048-s3-b16-tol.0.05"


def test_mfu_of_a_published_speed(shared: Command) -> None:
    model = ("--model", "llama3-8b", "--recipe", "tensorwise", "--dp-shard", "8")
    done = shared.run("metrics", *model, "--device", "h100", "--tokens-per-s", "7773", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["formula"]["case_id"].startswith("fsdp8-tensorwise-dim.4096-layers.32-")
    assert found["speed"]["tflops"] == pytest.approx(450.169, abs=1e-3)
    assert found["speed"]["mfu_weighted"] == pytest.approx(0.2905, abs=1e-4)


def test_a_case_with_another_layout(shared: Command) -> None:
    done = shared.run("metrics", CASE, "--tp", "2", "--rank", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fsdp2-tp2-rowwise-v2048-s3-b16-tol.0.05\nrank 3 of 4, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no case. Fix: give one case id, or --model NAME."),
        ((CASE, "--model", "llama3-8b"), f"there are 2 of them: {CASE}, llama3-8b."),
        (("--model", "gpt2"), "there is no model 'gpt2'. Fix: give one of debugmodel, llama3-8b, "),
        (("--model", "llama3-8b", "--tokens", "100"), "100 tokens of a rank are not whole sequences of 8192."),
        (("--model", "llama3-8b", "--tp", "3"), "rule heads_divide_tp excludes "),
        (
            ("--model", "llama3-8b", "--device", "h20"),
            "the peaks of device 'h20' are not known. Fix: give one of h100, ",
        ),
        ((CASE, "--run", "--tokens-per-s", "5"), "--run measures the speed."),
        ((CASE, "--rank", "2"), "the case has ranks 0 to 1."),
    ],
)
def test_what_cannot_be_answered(shared: Command, words: tuple[str, ...], message: str) -> None:
    done = shared.run("metrics", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
