"""Derived tolerances: how they follow from BF16 runs with and without errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.derived_tolerance import (
    ADDED,
    DRAWS,
    LOSS_MARGIN,
    PARITY_MARGIN,
    derived_parity_tolerance,
    derived_tolerance,
)
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from tests.builders import make_sketch, make_trace, run_of

CASE = parse_case_id("tp2-tensorwise-dim.512-v4096-s4-b16")
LOSSES = (9.0, 8.0, 7.0, 6.0)

distances = st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=4)


def of_losses(losses: Sequence[float]) -> Run:
    return run_of(make_trace(losses=losses))


def draws(*away: Sequence[float]) -> list[Run]:
    return [of_losses([loss + distance for loss, distance in zip(LOSSES, draw, strict=True)]) for draw in away]


def test_the_first_steps_share_the_mean_distance_of_all_draws() -> None:
    away = [(0.01, -0.02, 0.03, 0.0), (-0.01, 0.02, -0.03, 0.0)]
    tolerance = derived_tolerance(CASE, of_losses(LOSSES), draws(*away))
    mean = math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 3)
    assert tolerance.per_step == pytest.approx([LOSS_MARGIN * mean] * 4)
    assert tolerance.derived and tolerance.key == "tiny_dim512-tensorwise-bfloat16"
    assert f"{DRAWS} BF16 runs" in tolerance.evidence


def test_one_draw_that_runs_away_is_left_out() -> None:
    away = [(0.0, 0.0, 0.0, 0.03), (0.0, 0.0, 0.0, -0.04), (0.0, 0.0, 0.0, 5.0)]
    per_step = derived_tolerance(CASE, of_losses(LOSSES), draws(*away)).per_step
    assert per_step == pytest.approx([0, 0, 0, LOSS_MARGIN * math.sqrt((0.03**2 + 0.04**2) / 2)], abs=1e-9)
    assert derived_tolerance(CASE, of_losses(LOSSES), draws(*away[:2], (0, 0, 0, math.nan))).per_step == per_step
    away = (0.1, 0.1, 0.1, math.nan)
    assert math.isnan(derived_tolerance(CASE, of_losses(LOSSES), draws(away, away)).per_step[-1])
    early = (math.nan, 0.1, 0.1, 0.1)
    assert all(map(math.isnan, derived_tolerance(CASE, of_losses(LOSSES), draws(early, early)).per_step))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_tolerance_for_every_step(steps: int) -> None:
    reference, noisy = (of_losses([loss + distance for loss in LOSSES[:steps]]) for distance in (0, 0.1))
    assert derived_tolerance(CASE, reference, [noisy] * 4).per_step == pytest.approx([LOSS_MARGIN * 0.1] * steps)


@given(st.lists(distances, min_size=DRAWS, max_size=DRAWS), st.floats(1.0, 10.0))
def test_tolerances_of_losses_never_shrink_and_grow_with_the_distances(away: list[list[float]], factor: float) -> None:
    per_step = derived_tolerance(CASE, of_losses(LOSSES), draws(*away)).per_step
    assert len(per_step) == 4 and list(per_step) == sorted(per_step)
    wider = draws(*[[factor * distance for distance in one] for one in away])
    assert derived_tolerance(CASE, of_losses(LOSSES), wider).per_step == pytest.approx(
        [factor * allowed for allowed in per_step], rel=1e-6, abs=1e-9
    )


def gradients(*values: float) -> Run:
    sketches = tuple(make_sketch("w", step, value=value) for step, value in enumerate(values, start=1))
    return run_of(make_trace(sketches=sketches))


def test_the_largest_distance_of_a_gradient_counts_up_to_every_step() -> None:
    reference = gradients(1.0, 1.0, 1.0, 1.0)
    noisy = [gradients(1.1, 1.0, 1.3, 1.0), gradients(1.0, 0.8, 1.0, 1.0), gradients(9.0, 9.0, 9.0, 9.0)]
    tolerance = derived_parity_tolerance(CASE, reference, noisy)
    assert tolerance.per_step == pytest.approx(
        [PARITY_MARGIN * distance for distance in (0.1, 0.2, 0.3, 0.3)], rel=1e-5
    )


def test_equal_gradients_added_in_another_order_are_as_far_apart_as_that_rounds() -> None:
    of = parse_case_id("target.mine-fsdp2-tensorwise-v2048-s3-b16")
    reference, noisy = gradients(1.0, 1.0, 1.0), gradients(1.1, 1.2, 1.1)
    per_step = derived_parity_tolerance(of, reference, [noisy] * 4).per_step
    assert per_step == pytest.approx([ADDED, 0.6, 0.6], rel=1e-5)
