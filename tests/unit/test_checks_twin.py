"""What the twin says of a loss that is off."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from harness.checks.loss_vs_golden import needs_twin, with_twin_diagnosis
from harness.trace import Run
from harness.verdict import Verdict
from tests.builders import a_finding, make_golden, make_trace, run_of

GOLDEN = make_golden(losses=(8.0, 7.0))
OFF = (
    a_finding(rule="loss_vs_golden/loss", verdict=Verdict.NUMERIC, message="off"),
    a_finding(check="parity", verdict=Verdict.NUMERIC, message="too"),
)
UNJUDGED = a_finding(rule="loss_vs_golden/no-golden", judged=False)


def run(*losses: float) -> Run:
    return run_of(make_trace(losses=losses))


def test_only_losses_ask_for_the_twin() -> None:
    assert needs_twin(OFF)
    assert not needs_twin((*OFF[1:], UNJUDGED))


@pytest.mark.parametrize(
    ("twin", "word"),
    [
        (run(8.0, 7.001), "look at FP8"),
        (run(8.0, 7.2), "not FP8"),
        (run(8.0, math.nan), "not finite: not FP8"),
        (run(8.0, math.inf), "not finite: not FP8"),
        (None, "could not be run"),
    ],
)
@pytest.mark.parametrize("found", [7.3, math.nan, math.inf])
def test_the_twin_says_where_to_look(found: float, twin: Run | None, word: str) -> None:
    if twin == run(8.0, 7.2) and not math.isfinite(found):
        word = "look at FP8"  # whatever the twin is off by, it does not explain a loss that is no number
    loss, other = with_twin_diagnosis(OFF, run(8.0, found), GOLDEN, twin)
    assert word in loss.details and "nan" not in loss.details
    assert replace(loss, details="") == OFF[0] and other == OFF[1]


@pytest.mark.parametrize("losses", [(math.nan, 7.0), (8.0, math.nan)])
def test_nan_in_any_step_is_the_largest_distance(losses: tuple[float, float]) -> None:
    (loss,) = with_twin_diagnosis(OFF[:1], run(8.0, 7.3), GOLDEN, run(*losses))
    assert "not finite" in loss.details
