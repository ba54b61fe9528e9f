"""What the twin says of a loss that is off."""

from __future__ import annotations

import math

import pytest

from harness.checks.twin import asks_for_twin, with_twins_word
from harness.measured.golden import Golden, Provenance
from harness.trace import RankTrace, Run, StepTrace
from harness.verdict import Finding

GOLDEN = Golden(
    schema=1,
    digest="",
    family="f",
    hardware="cpu",
    case_id="c",
    losses=(8.0, 7.0),
    grad_norms=(1.0, 1.0),
    data_digest="d",
    provenance=Provenance(
        software={}, device="cpu", commit="", command="", reason="r", created="2026-01-01T00:00:00+00:00"
    ),
)
OFF = (Finding(check="loss_vs_golden", message="off"), Finding(check="parity", message="too"))


def run(*losses: float) -> Run:
    steps = tuple(
        StepTrace(step=number, loss=loss, grad_norm=1.0, scaled_mm_calls=0, seconds=0.0)
        for number, loss in enumerate(losses, 1)
    )
    trace = RankTrace(
        rank=0,
        steps=steps,
        converted_fqns=(),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
    )
    return Run(traces=(trace,), failures=())


def test_only_losses_ask_for_the_twin() -> None:
    assert asks_for_twin(OFF)
    assert not asks_for_twin(OFF[1:])


@pytest.mark.parametrize(
    ("twin", "word"),
    [
        (run(8.0, 7.001), "look at FP8"),
        (run(8.0, 7.2), "not FP8"),
        (run(8.0, math.nan), "not FP8"),
        (None, "could not be run"),
    ],
)
def test_the_twin_says_where_to_look(twin: Run | None, word: str) -> None:
    loss, other = with_twins_word(OFF, run(8.0, 7.3), GOLDEN, twin)
    assert loss.message.startswith("off\n") and word in loss.message
    assert other == OFF[1]
