"""What async TP must fuse: the table that was counted with torch 2.13, and what it means for the number of matmuls."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.graphs import FusionKind, expected_fusions
from harness.expect.expectations import Expectations
from harness.matrix.case import Case, Checkpointing, Float8, Layout, Train
from harness.matrix.caseid import parse_case_id
from harness.matrix.dims.tp import extra_matmul_calls, fusion_candidates

LAYERS = 2
GATHERS = {"bf16", "tensorwise-tpstyle.fp8"}  # recipes whose gathers feed matmuls as they are


def fused(text: str) -> dict[str, int]:
    """Fused operators of one block: forward gathers and scatters, backward gathers and scatters."""
    counts = expected_fusions(Expectations(parse_case_id(text)))
    names = {
        "fw_ag": FusionKind("forward", "all_gather"),
        "fw_rs": FusionKind("forward", "reduce_scatter"),
        "bw_ag": FusionKind("backward", "all_gather"),
        "bw_rs": FusionKind("backward", "reduce_scatter"),
    }
    return {name: counts[kind] // LAYERS for name, kind in names.items()}


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "tensorwise-tpstyle.fp8", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(
    ("ac", "bw_ag", "bw_rs"), [("", 2, 0), ("-ac.full", 4, 1), ("-ac.op", 4, 0), ("-ac.layer1", 4, 1)]
)
def test_the_measured_table(recipe: str, ac: str, bw_ag: int, bw_rs: int) -> None:
    several = fused(f"atp2-{recipe}{ac}-graph-v2048-b16")
    gathers = recipe in GATHERS
    assert several == {"fw_ag": 2 * gathers, "fw_rs": 2, "bw_ag": bw_ag * gathers, "bw_rs": bw_rs}
    one = fused(f"atp2-{recipe}{ac}-graph-v2048-gb1-b16")
    assert one == {"fw_ag": 0, "fw_rs": 2, "bw_ag": 0, "bw_rs": bw_rs}


def test_what_scaling_biases_and_filters_leave_to_be_fused() -> None:
    assert not expected_fusions(Expectations(parse_case_id("atp2-rowwise-graph-v2048-f32")))
    assert expected_fusions(Expectations(parse_case_id("atp2-tensorwise-graph-v2048-f32")))
    assert fused("atp2-bf16-ac.full-graph-bias-v2048-b16") == {"fw_ag": 0, "fw_rs": 0, "bw_ag": 2, "bw_rs": 0}
    assert not expected_fusions(Expectations(parse_case_id("atp2-tensorwise-graph-bias-v2048-b16")))
    assert fused("atp2-tensorwise-filter.wo-graph-bias-v2048-b16") == {"fw_ag": 0, "fw_rs": 0, "bw_ag": 1, "bw_rs": 0}
    filtered = fused("atp2-tensorwise-filter.wk+wq+wv-graph-v2048-b16")
    assert (filtered["fw_ag"], filtered["fw_rs"]) == (1, 2)
    mixed = "atp2-tensorwise-filter.wq-graph-v2048-b16"  # counted on ranks: wq alone reads what is gathered
    assert fused(mixed)["fw_ag"] == 1
    assert extra_matmul_calls(parse_case_id(mixed), scaled=False) == LAYERS


# Counted on ranks: 42 plain calls, 46 with two scatters a block in two pieces, 60 with five gathered linears too.
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("atp2-tensorwise-graph-v2048-b16", 46),
        ("atp2-tensorwise-tpstyle.fp8-graph-v2048-b16", 60),
        ("atp2-tensorwise-tpstyle.fp8-ac.full-graph-v2048-b16", 84),
        ("atp2-tensorwise-tpstyle.fp8-ac.op-graph-v2048-b16", 68),
        ("atp2-fallback-tensorwise-tpstyle.fp8-graph-v2048-b16", 42),
        ("tp2-tensorwise-ac.full-v2048-f64", 56),
        ("tp2-tensorwise-ac.full-graph-v2048-f64", 54),  # compiled, only what backward reads
        ("tp2-tensorwise-ac.op-v2048-f64", 48),
        ("tp2-tensorwise-ac.op-graph-v2048-f64", 46),
        ("tp2-nosp-tensorwise-ac.op-graph-v2048-f64", 48),
    ],
)
def test_pieces_of_fused_matmuls_and_what_is_recomputed_are_counted(text: str, calls: int) -> None:
    assert Expectations(parse_case_id(text)).scaled_mm_calls == (calls, calls)


CASES = st.builds(
    Case,
    layout=st.builds(
        Layout,
        tp=st.sampled_from([2, 4, 8]),
        dp_shard=st.sampled_from([1, 2]),
        async_tp=st.just(True),
        symm_mem=st.sampled_from(["pipelined", "fallback"]),
    ),
    float8=st.builds(Float8, recipe=st.sampled_from(["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])),
    checkpointing=st.builds(
        Checkpointing,
        mode=st.sampled_from(["none", "full", "selective_op", "selective_layer"]),
        every=st.integers(1, 2),
    ),
    compile=st.just("graph"),
    train=st.builds(Train, global_batch=st.sampled_from([2, 4, 8]), dtype=st.sampled_from(["bfloat16", "float64"])),
)


@given(CASES)
def test_fusions_of_any_case(case: Case) -> None:
    """A joint counts once at any TP degree, only pipelined operators cut matmuls, without async TP nothing is fused."""
    other, fallback, plain = (
        msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, **changes))
        for changes in ({"tp": 2}, {"symm_mem": "fallback"}, {"async_tp": False})
    )
    assert fusion_candidates(case) == fusion_candidates(other)
    kinds = Counter(FusionKind(candidate.phase, candidate.collective) for candidate in fusion_candidates(case))
    blocks = case.model.shape.layers
    assert kinds[FusionKind("forward", "all_gather")] == kinds[FusionKind("forward", "reduce_scatter")] == 2 * blocks
    assert expected_fusions(Expectations(case)) <= kinds
    assert extra_matmul_calls(fallback, scaled=True) == 0
    assert extra_matmul_calls(case, scaled=True) % (case.layout.tp - 1) == 0
    assert fusion_candidates(plain) == ()
