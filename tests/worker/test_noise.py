"""Rounding errors drawn at random: as large as float8 makes them, and the same on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checks.measuring import DRAWS, derived_parity_tolerance, derived_tolerance
from harness.evidence.tolerance import noise, parity_key, read_evidence, tolerance_key
from harness.matrix.caseid import parse_case_id, reference_case
from harness.matrix.linears import converted_fqns
from harness.matrix.recipes import E5M2
from harness.request import Noise, noise_of
from harness.worker.training.noise import add_noise
from tests.worker.runs import numbers

PROJECT = Path(__file__).parents[2]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text",
    [
        "tp2-tensorwise-v2048-b16",
        "tp2-tensorwise-v2048-f32",
        "tp2-rowwise-v2048-b16",
        "tp2-rowwise_with_gw_hp-v2048-b16",
        "tp2-tensorwise-head.fp8-v2048-b16",
        "tp2-rowwise-head.fp8-v2048-b16",
        "tp2-bf16-v2048-b16",
    ],
)
def test_derived_tolerances_are_above_the_measured_noise_and_not_far_above(trained, text: str):
    case = parse_case_id(text)
    reference = trained(reference_case(case))
    draws = [
        trained(reference_case(case), noise=noise_of(case, draw, converted_fqns(case))) for draw in range(1, DRAWS + 1)
    ]
    loss, parity = (derive(case, reference, draws) for derive in (derived_tolerance, derived_parity_tolerance))
    for derived, key in ((loss, tolerance_key(case)), (parity, parity_key(case))):
        samples = [sample for sample in read_evidence(PROJECT, derived.name).samples if sample.key == key]
        for allowed, measured in zip(derived.per_step, noise(derived.name, samples), strict=False):
            assert 1.3 * measured < allowed < 13 * measured, derived.name


def test_a_draw_is_the_same_every_time_and_another_one_differs(trained, train):
    case = parse_case_id("tp2-tensorwise-v2048-gb4-s1-b16")
    first = trained(reference_case(case), noise=noise_of(case, 1, converted_fqns(case)))
    again = train(reference_case(case), noise=noise_of(case, 1, converted_fqns(case)))
    assert numbers(first.traces) == numbers(again)
    assert numbers(again) != numbers(train(reference_case(case), noise=noise_of(case, 2, converted_fqns(case))))


def test_a_linear_keeps_its_bias():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    add_noise(model, Noise(draw=1, float8_fqns=(), grad_output_dtype=E5M2))
    assert model(torch.zeros(1, 16)).min() > 99
