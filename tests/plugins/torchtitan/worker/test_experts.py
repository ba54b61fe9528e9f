"""torchtitan's mixtures of experts on real ranks: clean runs have the bits of one rank, and faults are named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from harness.checks import routing
from harness.checks.parity import check_parity
from harness.checks.routing import check_routing
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.verdict import Finding
from tests.builders import make_tolerance, make_witnesses
from tests.worker.conftest import Trained

FAULTS = Path(__file__).with_name("expert_faults.py")
PLAIN = parse_case_id("target.torchtitan-fsdp2-ep2-bf16-moe8-top3-sigmoid-balance-v2048-gb2-sl16-s2-b16")
FLOAT8 = parse_case_id("target.torchtitan-fsdp2-ep2-rowwise-gmm.fp8-moe4-v2048-gb4-s2-b16")
MXFP8 = parse_case_id("target.torchtitan-fsdp4-ep2-mxfp8-gmm.fp8-ac.full-moe4-v2048-gb4-s2-b16")

PROBES = ("sketches", "experts")


def judged(trained: Trained, case: Case, fault: str = "") -> list[Finding]:
    run = trained(case, probes=PROBES, injections=(f"{FAULTS}:{fault}",) if fault else ())
    witnesses = make_witnesses(
        case,
        solo=trained(case, probes=PROBES, solo=True),
        parity_tolerance=make_tolerance(*(1e-11,) * case.train.steps),
    )
    return [finding for check in (check_routing, check_parity) for finding in check(case, run, witnesses)]


@pytest.mark.parametrize("case", [PLAIN, FLOAT8, MXFP8], ids=["bf16", "rowwise", "mxfp8"])
def test_ranks_of_experts_have_the_bits_of_one(trained: Trained, case: Case) -> None:
    assert judged(trained, case) == []
    for trace in trained(case, probes=PROBES).traces:
        assert trace.experts is not None
        assert all(
            call.values.returned and call.gradients.sent for call in trace.expert_calls(1) if call.phase == "forward"
        )
        assert len(trace.experts.biases) == case.train.steps * case.model.balance


@pytest.mark.parametrize(
    ("fault", "case", "rule"),
    [
        ("rows_left_by_rank", PLAIN, routing.ARRIVED),
        ("results_left_by_expert", PLAIN, routing.RETURNED),
        ("token_lost_on_its_way", PLAIN, routing.ARRIVED),
        ("gradients_of_tokens_moved", PLAIN, routing.GRADIENT_RETURNED),
        ("gradients_of_results_moved", PLAIN, routing.GRADIENT_ARRIVED),
        ("counts_of_another_expert", PLAIN, routing.COUNTS),
        ("choice_of_another_token", PLAIN, routing.ROUTER),
        ("choice_not_normalized", PLAIN, routing.WEIGHTS),
        ("experts_of_one_rank_permuted", PLAIN, routing.EXPERTS),
        ("shared_expert_lost", PLAIN, None),
        ("expert_gradients_times_ep", PLAIN, None),
        ("bias_moves_to_the_busy", PLAIN, routing.BIAS),
        ("experts_left_in_bfloat16", FLOAT8, routing.MATMULS),
        ("padding_of_another_row", FLOAT8, routing.COUNTS),
        ("float8_experts_of_one_rank_permuted", FLOAT8, routing.EXPERTS),
        ("gradients_of_results_moved", MXFP8, routing.GRADIENT_ARRIVED),
    ],
)
def test_a_fault_is_named(trained: Trained, fault: str, case: Case, rule: routing.Rule | None) -> None:
    """Without a rule of routing parity names the gradients."""
    names = [finding.rule for finding in judged(trained, case, fault)]
    assert (rule.name in names) if rule else any(name.startswith("parity/") for name in names), names


def test_float8_experts_are_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.plugins.torchtitan.worker import experts

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs Triton: install it"):
        experts.converted_experts(FLOAT8, None)
