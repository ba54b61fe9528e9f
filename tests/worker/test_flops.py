"""What ranks multiply is what the formula says, and a fault that multiplies otherwise shows in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.checks.measuring import measured, moved
from harness.gate.gate import gate
from harness.gate.reason import Kind
from harness.matrix.caseid import parse_case_id
from harness.measured import Measured
from harness.worker.dispatch_hooks import products
from tests.builders import make_result, make_results, make_witnesses, run_of
from tests.unit.test_gate import TERMS
from tests.worker.runs import sweep

CASES = (  # more, compiled ones too, are in `test_clean_runs.py` and `test_compiled.py`
    "single-bf16-ac.op-bias-v2048-s1-f64",  # saves no matmul that adds a bias
    "single-tensorwise-v2048-s1-eval-f64",
    "single-tensorwise-pad-v2048-gb1-sl40-s1-f64",
    sweep("single-tensorwise-ac.full-v2048-s1-f64"),
    sweep("tp2-rowwise-bias-v2048-s2-f64-tol.0.02"),
    sweep("fsdp2-rowwise-ac.op-v2048-s1-b16"),
    sweep("fsdp2-tensorwise-ag.fp8-v2048-s1-accum2-b16"),
    sweep("tp2-rowwise_with_gw_hp-v2048-s1-f64"),
    sweep("atp2-bf16-ac.full-graph-v2048-gb4-s1-b16"),
)
HOST = "single-rowwise-v2048-s1-f64"
CHECKPOINTED = "single-tensorwise-ac.layer2-v2048-s1-f64"
RECOMPUTES_MORE = """
from harness.worker.targets.reference import build, parallel
from harness.matrix.case import Checkpointing

def apply():
    build.apply_checkpointing = lambda layers, _: parallel.apply_checkpointing(layers, Checkpointing(mode="full"))
"""


@pytest.fixture
def numbers(train):
    def of(name: str, *injections: str) -> Measured:
        case = parse_case_id(name)
        run = run_of(*train(case, probes=("flops", "operands"), injections=injections))
        found = measured(case, run, make_witnesses(case))
        assert found is not None
        return found

    return of


@pytest.mark.parametrize("name", CASES)
def test_flops_calls_and_casts_are_those_of_the_formula(numbers, name):
    found = numbers(name)
    assert found.flops == found.expected_flops
    assert found.cast_calls == found.expected_cast_calls


@pytest.mark.parametrize(
    ("name", "planted", "change"),
    [
        (HOST, "fault:weight_gradient_in_high_precision", {"matmuls in float8": -1, "matmuls in float64": 1}),
        (CHECKPOINTED, "apply", {"matmuls in float8": 1, "attention in float64": 1}),
    ],
)
def test_planted_faults_move_flops(numbers, plant, name, planted, change):
    before, after = numbers(name), numbers(name, *plant(RECOMPUTES_MORE, planted))
    assert "FLOPs" in moved(before, after)
    signs = {words: np.sign(each.flops - before.flops[words].flops) for words, each in after.flops.items()}
    assert {words: sign for words, sign in signs.items() if sign} == change
    found = gate(*(make_results(make_result(name, measured=each)) for each in (before, after)), TERMS)
    assert Kind.MATMULS in {reason.kind for reason in found.gating}


def test_products_count_once_and_fake_ones_do_not():
    seen = []
    products.observers.append(seen.append)
    try:
        a, b = torch.ones(4, 8), torch.ones(8, 2)
        a @ b
        torch.addmm(torch.ones(2), a, b)
        torch.bmm(a[None].repeat(3, 1, 1), b[None].repeat(3, 1, 1))
        a.to("meta") @ b.to("meta")
    finally:
        products.observers.remove(seen.append)
    assert [(each.part, each.flops) for each in seen] == [("matmuls", 128), ("matmuls", 128), ("matmuls", 384)]
