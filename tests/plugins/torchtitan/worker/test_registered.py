"""Models of torchtitan's registry, and its clipping, on real ranks: clean runs pass, and faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checks.parity import check_parity
from harness.checks.reported import NOT_CLIPPED, check_clipping
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.verdict import Finding
from tests.builders import make_case, make_tolerance, make_witnesses
from tests.worker.conftest import Trained

SEAMS = Path(__file__).with_name("seam_faults.py")
FUSED = parse_case_id("target.torchtitan.llama3-fsdp2-tp2-bf16-v2048-gb4-sl16-s1-f64")
SHARDS = parse_case_id("target.torchtitan-fsdp2-tp2-rowwise-v2048-gb4-s1-clip0.01-f64")
STAGES = parse_case_id("target.torchtitan-pp2-bf16-v2048-s1-accum4-clip0.01-f64")
EXPERTS = parse_case_id("target.torchtitan-fsdp2-ep2-bf16-moe4-v2048-gb4-s1-clip0.01-b16")


def judged(trained: Trained, case: Case, fault: str = "") -> list[Finding]:
    run = trained(case, injections=(f"{SEAMS}:{fault}",) if fault else ())
    witnesses = make_witnesses(case, solo=trained(case, solo=True), parity_tolerance=make_tolerance(1e-11))
    clipping = check_clipping(case, run, witnesses) if case.train.max_norm else ()
    return [*clipping, *check_parity(case, run, witnesses)]


@pytest.mark.parametrize(
    ("fault", "case", "rule"),
    [
        ("keys_and_values_swapped", FUSED, "parity/loss"),
        ("queries_of_another_group", FUSED, "parity/loss"),
        ("norm_of_own_shards", SHARDS, NOT_CLIPPED.name),
        ("norm_of_own_stage", STAGES, NOT_CLIPPED.name),
        ("experts_not_clipped", EXPERTS, NOT_CLIPPED.name),
    ],
)
def test_a_fault_is_found(trained: Trained, fault: str, case: Case, rule: str) -> None:
    assert rule in {finding.rule for finding in judged(trained, case, fault)}


@pytest.mark.parametrize("case", [FUSED, STAGES, EXPERTS])
def test_without_a_fault_nothing_is_found(trained: Trained, case: Case) -> None:
    assert judged(trained, case) == []


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_the_model_is_the_one_of_the_registry(name: str, recipe: str) -> None:
    from harness.plugins.torchtitan.worker.registered import registered_spec
    from harness.worker.probes.discovery import converted_linears, linears

    case = make_case(target=f"torchtitan.{name}", recipe=recipe, vocab_size=2250, pad_vocab_to_multiple_of=16)
    with torch.device("meta"):
        model = registered_spec(case).model.build()
    everything = set(linears(model))
    assert "layers.0.attention.qkv_linear.wqkv" in everything
    assert set(converted_linears(model)) == everything - {"lm_head"}
    assert model.lm_head.out_features == model.tok_embeddings.num_embeddings == 2256


def test_other_sizes_are_refused() -> None:
    from harness.plugins.torchtitan.worker.registered import registered_spec

    with pytest.raises(ValueError, match="has its own sizes: for others give --target torchtitan"):
        registered_spec(make_case(target="torchtitan.llama3", layers=4))
