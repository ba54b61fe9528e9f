"""Compiled blocks and async TP on real ranks: fused operators, live faults, what is sent, saved and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from harness.checks.fp8_on import check_matmuls
from harness.checks.graph_scales import check_graph_scales
from harness.checks.graphs import ROWS, check_graphs
from harness.checks.measuring import measured
from harness.checks.memory import KEPT, NO_MARKS, check_leaks, check_live_memory, check_memory
from harness.checks.recompute import NODES, NOTHING_REPEATED, check_recompute
from harness.checks.traffic import check_traffic
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from harness.worker.process.process import PROCESS
from harness.worker.virtual import graph_backend
from tests.builders import make_witnesses, rules
from tests.jobs import make_share, run_alone
from tests.worker.runs import sweep

FIX = f"{Path(__file__).parents[2] / 'cases' / 'fixes' / 'scattered_rows.py'}:apply"
PROBES = ("sketches", "traffic", "saved_memory", "graphs", "flops")
SAVED = (check_memory, check_recompute, check_live_memory, check_leaks)
CHECKS = (check_graphs, check_graph_scales, check_traffic, check_matmuls, *SAVED)

ASYNC = "atp2-rowwise-ac.full-graph-v2048-gb2-s1-b16"  # the live fault shows
EAGER_COLLECTIVES = "tp2-rowwise-ac.op-graph-v2048-gb2-s2-b16"
SINGLE = "single-tensorwise-ac.full-graph-v2048-gb2-s2-f64"

# Relative to the row; what bfloat16 results and partial sums may be off.
ROUNDING = 0.02
# torch 2.13: rows are scattered by batch when the operand is collapsed and the scatter dim is the second one.
WRONG = {
    "pipelined collapsed tensorwise, reduce-scatter dim 1",
    "pipelined collapsed rowwise, reduce-scatter dim 1",
}


@pytest.fixture(scope="module")
def fused() -> Iterator[ZygoteEngine]:
    with ZygoteEngine("tests.worker.fusedprogram") as zygote:
        yield zygote


@pytest.fixture(scope="module", params=["shared", "gloo"])
def operators(
    request: pytest.FixtureRequest, fused: ZygoteEngine, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    share = make_share(tmp_path_factory.mktemp("fused"), 4, request.param.encode(), deadline_s=200)
    outcome = run_alone(fused, share)
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
    return [json.loads(rank.payload or b"") for rank in outcome.ranks]


def test_fused_operators_are_a_matmul_and_a_collective(operators: list[dict[str, float]]):
    assert all(len(report) == 2 * 2 * 8 for report in operators)
    off = {name for report in operators for name, worst in report.items() if not worst <= ROUNDING}
    assert off == WRONG


def test_rows_scattered_by_batch_are_no_rounding(operators: list[dict[str, float]]):
    assert all(report[name] > 10 * ROUNDING for report in operators for name in WRONG)


@pytest.fixture(scope="module")
def mended(trained) -> Run:
    """Of the case with the live fault, under the candidate fix, with all probes."""
    return trained(parse_case_id(ASYNC), probes=PROBES, injections=(FIX,))


def test_the_live_fault_is_located(trained):
    case = parse_case_id(ASYNC)
    broken = check_graphs(case, trained(case, probes=("graphs",)), make_witnesses(case))
    findings = [finding for finding in broken if finding.rule == ROWS.name]
    assert {finding.values["operator"] for finding in findings} == {"fused_scaled_matmul_reduce_scatter"}
    assert findings[0].found is not None
    assert "row [1, 0] of this rank holds row [0, 0] of TP rank 1" in findings[0].found


@pytest.mark.sweep  # the known case of tier pr is run with it
def test_the_candidate_fix_mends_it_and_probes_change_no_bit(trained, mended: Run):
    """The unfused collectives compute the same bits, and nothing but sketches watches them."""
    case = parse_case_id(ASYNC)
    assert_as_stated(case, mended)
    alone = trained(replace(case, layout=replace(case.layout, symm_mem="fallback")))
    assert all(trace.graphs is None for trace in alone.traces)
    assert [trace.sketches for trace in mended.traces] == [trace.sketches for trace in alone.traces]


def assert_as_stated(case: Case, run: Run) -> None:
    """Fusions, scales, traffic, matmuls, casts, saved and repeated nodes are those of the formulas."""
    witnesses = make_witnesses(case)
    assert [finding for check in CHECKS for finding in check(case, run, witnesses)] == []
    measurement = measured(case, run, witnesses)
    assert measurement.flops == measurement.expected_flops
    assert measurement.cast_calls == measurement.expected_cast_calls
    checkpointed = case.checkpointing.mode != "none"
    for trace in run.traces:
        assert trace.graphs.workarounds == ((graph_backend.WORKAROUND,) if checkpointed else ())
        assert len(trace.graphs.partitions) == (2 if case.checkpointing.mode == "selective_layer" else 1)
        assert all(0 < partition.repeated_in_passes <= partition.repeated for partition in trace.graphs.partitions)


@pytest.mark.parametrize(
    "text",
    [
        SINGLE,
        sweep(EAGER_COLLECTIVES),
        sweep("atp2-fallback-tensorwise-tpstyle.fp8-graph-v2048-gb2-s2-f64"),
        sweep("single-bf16-graph-v2048-gb2-s3-f32"),
        sweep("single-rowwise-graph-v2048-gb1-s1-b16"),
        sweep("fsdp2-atp2-rowwise-ac.op-graph-v2048-gb2-s2-b16"),
        sweep("atp2-fallback-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb2-s2-f64"),
        sweep("tp2-nosp-rowwise_with_gw_hp-ac.op-graph-v2256-gb1-s2-f64"),
        sweep("fsdp2-tensorwise-ag.fp8-graph-v2048-gb2-s3-b16"),
        sweep("hsdp2x2-tensorwise-ac.layer2-graph-v2048-gb4-s2-f32"),
    ],
)
def test_what_runs_do_is_what_the_formulas_say(trained, text: str):
    case = parse_case_id(text)
    assert_as_stated(case, trained(case, probes=PROBES))


@pytest.mark.sweep  # a known case of tier pr shows the same
def test_the_gradient_of_an_async_input_is_lost_and_waiting_keeps_it(train):
    lost = parse_case_id("atp2-nowait-bf16-graph-v2048-gb2-s1-b16")
    kept = replace(lost, layout=replace(lost.layout, wait_for_embedding=True))

    def norm(case):
        sketches = train(case, probes=("sketches",))[0].sketches
        (grad,) = [sketch for sketch in sketches if sketch.fqn == "tok_embeddings.weight" and sketch.kind == "grad"]
        return grad.norm_squared

    assert norm(lost) == 0
    assert norm(kept) > 0


@pytest.mark.sweep  # with the row above
def test_without_async_tp_nothing_is_fused_and_the_reason_is_recorded(trained):
    for trace in trained(parse_case_id(EAGER_COLLECTIVES), probes=PROBES).traces:
        assert trace.graphs.calls == ()
        assert {left.reason for graph in trace.graphs.graphs for left in graph.unfused} == {"the fusion pass is off"}


def test_an_eager_run_has_no_graphs(train):
    """The zygote has imported what it takes."""
    (trace,) = train(parse_case_id("single-bf16-v2048-gb2-s1-b16"), probes=("graphs",))
    assert trace.graphs is None


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text", ["single-rowwise-ac.op-inductor-v2048-gb2-s2-b16", "atp2-fallback-bf16-ac.full-inductor-v2048-gb2-s2-f64"]
)
def test_generated_code_saves_and_repeats_what_it_must(trained, text: str):
    run = trained(parse_case_id(text), probes=PROBES)
    assert saved_findings(text, run) == []
    assert all(part.repeated_in_passes for trace in run.traces for part in trace.graphs.partitions)


def saved_findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    return [finding for check in SAVED for finding in check(case, run, make_witnesses(case))]


@pytest.mark.parametrize("text", [SINGLE, sweep("atp2-tensorwise-ac.full-graph-v2048-gb4-s2-b16")])
@pytest.mark.parametrize(
    ("fault", "broken", "nodes"),
    [
        ("compiled_checkpointing_lost", {NO_MARKS.name, NOTHING_REPEATED.name}, set()),
        ("compiled_matmul_outputs_kept", {KEPT.name}, set()),
        ("recomputed_cast_by_another_scale", {NODES.name}, {1}),
        sweep("recomputed_norm_without_epsilon", {NODES.name}, {2}),
    ],
)
def test_planted_faults_are_found_and_named(trained, text: str, fault: str, broken: set[str], nodes: set[int]):
    run = trained(parse_case_id(text), probes=PROBES, injections=(f"fault:{fault}",))
    findings = saved_findings(text, run)
    assert broken <= rules(findings), findings
    assert {finding.values["count"] for finding in findings if finding.rule == NODES.name} == nodes
    assert {finding.check for finding in findings} <= {"memory", "recompute"}


def test_a_cast_that_clamps_at_another_maximum_is_found(trained):
    case = parse_case_id(SINGLE)
    run = trained(case, probes=PROBES, injections=("fault:compiled_cast_clamps_early",))
    findings = check_graph_scales(case, run, make_witnesses(case))
    assert findings and {finding.check for finding in findings} == {"graph_scales"}


@pytest.mark.parametrize("fault", ["compiled_checkpointing_lost", "compiled_matmul_outputs_kept"])
def test_what_is_saved_changes_no_bit(trained, fault: str):
    case = parse_case_id(SINGLE)
    clean, planted = trained(case, probes=PROBES), trained(case, probes=PROBES, injections=(f"fault:{fault}",))
    assert [trace.sketches for trace in clean.traces] == [trace.sketches for trace in planted.traces]


@pytest.mark.parametrize(("dropout", "saves_state"), [(0.0, False), (0.1, True)])
def test_random_numbers_are_left_alone_only_where_none_are_drawn(monkeypatch, dropout: float, saves_state: bool):
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    graph.output(graph.call_function(attention, (query, query, query, dropout)))
    module = torch.fx.GraphModule({}, graph)
    monkeypatch.setattr(PROCESS, "workarounds", [])
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert graph_backend._only_if_any_op_draws(lambda _: True)(module) is saves_state
    assert PROCESS.workarounds == ([] if saves_state else [graph_backend.WORKAROUND])
    assert graph_backend._only_if_any_op_draws(lambda _: False)(module) is False
