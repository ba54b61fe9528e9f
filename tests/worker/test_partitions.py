"""Compiled blocks on real ranks: what they save and compute again is what the formulas say, and faults are found."""

from __future__ import annotations

import pytest

from harness.checks.live_memory import check_leaks, check_live_memory
from harness.checks.memory import check_memory
from harness.checks.recompute import check_recompute
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_witnesses
from tests.worker.runs import sweep

PROBES = ("sketches", "saved_memory", "graphs")

SINGLE = "single-tensorwise-ac.full-graph-v2048-gb2-s2-f64"
ASYNC = "atp2-tensorwise-ac.full-graph-v2048-gb4-s2-b16"

CASES = [
    SINGLE,
    sweep("single-bf16-graph-v2048-gb2-s3-f32"),
    "tp2-rowwise-ac.op-graph-v2048-gb2-s2-b16",
    sweep("tp2-nosp-rowwise_with_gw_hp-ac.op-graph-v2256-gb1-s2-f64"),
    "atp2-tensorwise-tpstyle.fp8-graph-v2048-gb2-s2-b16",
    sweep("fsdp2-tensorwise-ag.fp8-graph-v2048-gb2-s3-b16"),
    sweep("fsdp2-atp2-rowwise-ac.full-graph-v2048-gb4-s2-b16"),
    sweep("hsdp2x2-tensorwise-ac.layer2-graph-v2048-gb4-s2-f32"),
]


def findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    checks = (check_memory, check_recompute, check_live_memory, check_leaks)
    return [finding for check in checks for finding in check(case, run, make_witnesses(case))]


@pytest.mark.parametrize("text", CASES)
def test_clean_runs_save_and_repeat_what_they_must(trained, text: str):
    case = parse_case_id(text)
    run = trained(case, probes=PROBES)
    assert findings(text, run) == []
    for trace in run.traces:
        partitions = trace.graphs.partitions
        assert len(partitions) == (2 if case.checkpointing.mode == "selective_layer" else 1)
        assert all(0 < each.repeated_in_passes <= each.repeated for each in partitions)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text", ["single-rowwise-ac.op-inductor-v2048-gb2-s2-b16", "atp2-fallback-bf16-ac.full-inductor-v2048-gb2-s2-f64"]
)
def test_generated_code_saves_and_repeats_what_it_must(trained, text: str):
    run = trained(parse_case_id(text), probes=PROBES)
    assert findings(text, run) == []
    assert all(part.repeated_in_passes for trace in run.traces for part in trace.graphs.partitions)


@pytest.mark.parametrize("text", [SINGLE, sweep(ASYNC)])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("compiled_checkpointing_lost", {"do not have the marks of checkpointing", "repeat nothing of forward"}),
        ("compiled_matmul_outputs_kept", {"that checkpointing computes again are saved for backward"}),
        ("recomputed_cast_by_another_scale", {"1 node of backward graphs is not as in forward"}),
        ("recomputed_norm_without_epsilon", {"2 nodes of backward graphs are not as in forward"}),
    ],
)
def test_planted_faults_are_found_and_named(trained, text: str, fault: str, words: set[str]):
    run = trained(parse_case_id(text), probes=PROBES, injections=(f"fault:{fault}",))
    found = findings(text, run)
    assert all(any(word in finding.message for finding in found) for word in words), found
    assert {finding.check for finding in found} <= {"memory", "recompute"}


@pytest.mark.parametrize("fault", ["compiled_checkpointing_lost", "compiled_matmul_outputs_kept"])
def test_what_is_saved_changes_no_bit(trained, fault: str):
    case = parse_case_id(SINGLE)
    clean, planted = trained(case, probes=PROBES), trained(case, probes=PROBES, injections=(f"fault:{fault}",))
    assert [trace.sketches for trace in clean.traces] == [trace.sketches for trace in planted.traces]
