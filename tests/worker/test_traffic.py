"""Real ranks send exactly what the formula says, and the wire check sees what planted faults send instead."""

from __future__ import annotations

import pytest

from harness.checks.wire import check_wire
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, Float8, Layout, Model, Train
from harness.trace import RankTrace, Run
from harness.verdict import Finding

TRAIN = Train(steps=2, global_batch=4, seq_len=32)
MIXED = Train(steps=2, global_batch=4, seq_len=32, dtype="bfloat16")
TP, FSDP, HSDP = Layout(tp=2), Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)
TENSORWISE = Float8(recipe="tensorwise")
STYLED = Float8(recipe="tensorwise", tp_styles="float8")
GATHERED = Float8(recipe="tensorwise", fp8_all_gather=True)
PRECOMPUTED = Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=True)
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)

CLEAN = {
    "single": Case(float8=TENSORWISE, train=TRAIN),
    "single-bfloat16": Case(float8=TENSORWISE, train=MIXED),
    "tp2-bf16": Case(layout=TP, train=TRAIN),
    "tp2-tensorwise-bfloat16": Case(layout=TP, float8=TENSORWISE, train=MIXED),
    "tp2-rowwise-full": Case(
        layout=TP, float8=Float8(recipe="rowwise"), checkpointing=Checkpointing(mode="full"), train=TRAIN
    ),
    "tp2-gw_hp-selective_op": Case(
        layout=TP,
        float8=Float8(recipe="rowwise_with_gw_hp", output_layer=True),
        checkpointing=Checkpointing(mode="selective_op"),
        train=TRAIN,
    ),
    "tp2-styles-full": Case(layout=TP, float8=STYLED, checkpointing=Checkpointing(mode="full"), train=TRAIN),
    "tp2-styles-no-sequence-parallel": Case(
        layout=Layout(tp=2, sequence_parallel=False, loss_parallel=False), float8=STYLED, train=TRAIN
    ),
    "tp2-no-sequence-parallel-selective_op": Case(
        layout=Layout(tp=2, sequence_parallel=False),
        float8=TENSORWISE,
        checkpointing=Checkpointing(mode="selective_op"),
        train=TRAIN,
    ),
    "tp4-vocab-2050": Case(model=Model(vocab_size=2050), layout=Layout(tp=4, loss_parallel=False), train=TRAIN),
    "fsdp2-tensorwise": Case(layout=FSDP, float8=TENSORWISE, train=TRAIN),
    "fsdp2-gathered": Case(layout=FSDP, float8=GATHERED, train=TRAIN),
    "fsdp2-precomputed-bfloat16": Case(
        layout=FSDP, float8=PRECOMPUTED, checkpointing=Checkpointing(mode="selective_layer"), train=MIXED
    ),
    "fsdp3": Case(layout=Layout(dp_shard=3), float8=TENSORWISE, train=Train(steps=2, global_batch=6, seq_len=32)),
    "hsdp-precomputed": Case(layout=HSDP, float8=PRECOMPUTED, train=TRAIN),
    "fsdp2-tp2-precomputed": Case(layout=Layout(dp_shard=2, tp=2), float8=PRECOMPUTED, train=TRAIN),
    "fsdp2-tp2-filtered": Case(
        layout=Layout(dp_shard=2, tp=2),
        float8=Float8(recipe="tensorwise", filter_fqns=("wk", "layers.0"), output_layer=True, fp8_all_gather=True),
        train=MIXED,
    ),
}


def findings(case: Case, traces: tuple[RankTrace, ...]) -> list[Finding]:
    return check_wire(case, Run(traces=traces, failures=()), WITNESSES)


@pytest.mark.parametrize("name", CLEAN)
def test_clean_runs_send_what_the_formula_says(train, name):
    case = CLEAN[name]
    traces = train(case, probes=("traffic",))
    assert findings(case, traces) == []
    assert all((trace.traffic != ()) == (case.world_size > 1) for trace in traces)


PLANTED = {
    "amax_not_reduced_over_tp": (Case(layout=TP, float8=TENSORWISE, train=TRAIN), "missing along tp"),
    "weight_amax_not_reduced_over_shards": (CLEAN["fsdp2-gathered"], "missing along dp_shard"),
    "weight_amax_over_replicas": (Case(layout=HSDP, float8=GATHERED, train=TRAIN), "over the wrong ranks"),
    "fp8_all_gather_subclass_dropped": (CLEAN["fsdp2-gathered"], "travel in high precision"),
    "fp8_tp_styles_lost": (Case(layout=TP, float8=STYLED, train=TRAIN), "all_gather in float8_e4m3fn along tp"),
    "norm_gradients_not_reduced": (CLEAN["tp2-bf16"], "gradients of norms"),
    "gradients_divided_by_world": (CLEAN["fsdp2-tensorwise"], "reduce_scatter (avg)"),
    "replicas_reduced_over_shards": (CLEAN["hsdp-precomputed"], "all_reduce (sum) in float32 along dp_replicate"),
    "gradients_reduced_in_low_precision": (CLEAN["fsdp2-precomputed-bfloat16"], "reduce_scatter (sum) in bfloat16"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found_and_named(train, fault):
    case, words = PLANTED[fault]
    found = findings(case, train(case, probes=("traffic",), injections=(f"fault:{fault}",)))
    assert any(words in finding.message for finding in found), found
    assert all(finding.step == 1 and finding.rank == 0 and finding.expected and finding.found for finding in found)


def test_the_harness_does_not_count_itself(train):
    """Other probes redistribute gradients to record them, and the norm of a step is reduced over all ranks."""
    case = CLEAN["tp2-bf16"]
    assert findings(case, train(case, probes=("sketches", "traffic"))) == []


def test_probes_change_no_bit(train):
    case = Case(
        layout=Layout(dp_shard=2, tp=2),
        float8=PRECOMPUTED,
        checkpointing=Checkpointing(mode="selective_op"),
        train=MIXED,
    )

    def numbers(probes: tuple[str, ...]) -> list[object]:
        traces = train(case, probes=("sketches", *probes))
        return [(trace.sketches, [(step.loss, step.grad_norm) for step in trace.steps]) for trace in traces]

    assert numbers(("traffic", "saved_memory")) == numbers(())
