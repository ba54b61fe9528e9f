"""Real ranks keep for backward exactly what the formula says, and the memory check sees what they keep besides."""

from __future__ import annotations

import pytest

from harness.checks.memory import check_memory
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, CheckpointMode, Float8, Layout, Model, Train
from harness.spec.saved import expected_order
from harness.trace import RankTrace, Run
from harness.verdict import Finding

TRAIN = Train(steps=2, global_batch=4, seq_len=32)
MIXED = Train(steps=2, global_batch=4, seq_len=32, dtype="bfloat16")
TP, FSDP = Layout(tp=2), Layout(dp_shard=2)
TENSORWISE = Float8(recipe="tensorwise")
STYLED = Float8(recipe="tensorwise", tp_styles="float8")
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")


def findings(case: Case, traces: tuple[RankTrace, ...]) -> list[Finding]:
    return check_memory(case, Run(traces=traces, failures=()), WITNESSES)


def total(traces: tuple[RankTrace, ...]) -> int:
    (saved, *_) = traces[0].saved_memory or ()
    return saved.saved_bytes


@pytest.mark.parametrize("train_dtype", [TRAIN, MIXED], ids=["float32", "bfloat16"])
def test_checkpointing_keeps_what_the_formula_says_and_less_in_the_promised_order(train, train_dtype):
    saved = {}
    for mode in MODES:
        case = Case(float8=TENSORWISE, checkpointing=Checkpointing(mode=mode), train=train_dtype)
        traces = train(case, probes=("saved_memory",))
        assert findings(case, traces) == []
        saved[case.checkpointing] = total(traces)
    assert expected_order(saved) == ()


@pytest.mark.parametrize(
    "case",
    [
        Case(layout=TP, float8=Float8(recipe="rowwise"), train=TRAIN),
        Case(layout=TP, float8=STYLED, train=MIXED),
        Case(layout=TP, float8=STYLED, checkpointing=Checkpointing(mode="selective_op"), train=TRAIN),
        Case(layout=Layout(tp=2, sequence_parallel=False, loss_parallel=False), float8=TENSORWISE, train=TRAIN),
        Case(model=Model(vocab_size=2050), layout=Layout(tp=4), train=TRAIN),
        Case(model=Model(kv_heads=4), layout=TP, float8=TENSORWISE, train=TRAIN),
        Case(layout=FSDP, float8=Float8(recipe="tensorwise", fp8_all_gather=True), train=TRAIN),
        Case(
            layout=Layout(dp_shard=2, tp=2),
            float8=Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=True, output_layer=True),
            checkpointing=Checkpointing(mode="selective_layer"),
            train=MIXED,
        ),
    ],
    ids=["rowwise", "styles", "styles-ac", "no-sp", "vocab", "kv_heads", "gathered", "fsdp2-tp2"],
)
def test_clean_runs_keep_what_the_formula_says(train, case):
    traces = train(case, probes=("saved_memory",))
    assert findings(case, traces) == []
    float8 = {record.float8_bytes for trace in traces for record in trace.saved_memory}
    assert (float8 != {0}) == (case.float8.tp_styles == "float8" and case.checkpointing.mode == "none")


PLANTED = {
    "checkpointing_lost": (
        Case(float8=TENSORWISE, checkpointing=Checkpointing(mode="full"), train=TRAIN),
        "it is what checkpointing none keeps",
    ),
    "float8_weight_kept_for_backward": (Case(layout=FSDP, float8=TENSORWISE, train=TRAIN), "float8_e4m3fn kept"),
    "abs_saved_for_backward": (
        Case(float8=TENSORWISE, checkpointing=Checkpointing(mode="selective_op"), train=TRAIN),
        "float32 kept",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found_and_named(train, fault):
    case, words = PLANTED[fault]
    found = findings(case, train(case, probes=("saved_memory",), injections=(f"fault:{fault}",)))
    assert any(words in finding.message for finding in found), found
    assert all(finding.step == 1 and finding.rank == 0 and finding.expected and finding.found for finding in found)
