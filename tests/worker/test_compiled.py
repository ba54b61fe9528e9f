"""Compiled blocks and async TP on real ranks: the fused operators, torch's live faults, and what leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from harness.checks.graph_scales import check_graph_scales
from harness.checks.graphs import check_graphs
from harness.checks.matmuls import check_matmuls
from harness.checks.traffic import check_traffic
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.caseid import parse_case_id
from harness.worker.virtual import rng
from tests.builders import make_witnesses
from tests.jobs import make_share, run_alone
from tests.worker.runs import sweep

FIX = f"{Path(__file__).parents[2] / 'cases' / 'fixes' / 'scattered_rows.py'}:apply"
PROBES = ("sketches", "traffic", "graphs")

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


def test_the_live_fault_is_located_and_the_candidate_fix_mends_it(trained):
    case = parse_case_id("atp2-rowwise-ac.full-graph-v2048-gb2-s1-b16")
    broken = check_graphs(case, trained(case, probes=PROBES), make_witnesses(case))
    findings = [finding for finding in broken if "gives wrong rows" in finding.message]
    assert findings
    assert all("fused_scaled_matmul_reduce_scatter" in finding.message for finding in findings)
    assert findings[0].found is not None
    assert "row [1, 0] of this rank holds row [0, 0] of TP rank 1" in findings[0].found
    mended = trained(case, probes=PROBES, injections=(FIX,))
    assert check_graphs(case, mended, make_witnesses(case)) == []
    expected = trained(replace(case, layout=replace(case.layout, symm_mem="fallback")))
    assert [trace.sketches for trace in mended.traces] == [trace.sketches for trace in expected.traces]


@pytest.mark.parametrize(
    "text",
    [
        sweep("fsdp2-atp2-rowwise-ac.op-graph-v2048-gb2-s2-b16"),
        "single-rowwise-graph-v2048-gb1-s1-b16",
        "atp2-fallback-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb2-s2-f64",
        sweep("tp2-nosp-rowwise_with_gw_hp-ac.op-graph-v2048-gb2-s2-b16"),
    ],
)
def test_fusions_traffic_and_matmuls_are_those_of_the_formulas(trained, text: str):
    case = parse_case_id(text)
    run = trained(case, probes=PROBES)
    for check in (check_graphs, check_graph_scales, check_traffic, check_matmuls):
        assert check(case, run, make_witnesses(case)) == []
    checkpointed = case.checkpointing.mode != "none"
    assert all(trace.graphs.workarounds == ((rng.NAME,) if checkpointed else ()) for trace in run.traces)


def test_probes_change_no_bit_of_a_compiled_run(train):
    case = parse_case_id("atp2-tensorwise-graph-v2048-gb2-s1-b16")
    watched, alone = train(case, probes=PROBES), train(case, probes=("sketches",))
    assert [trace.sketches for trace in watched] == [trace.sketches for trace in alone]


@pytest.mark.sweep  # a known case of tier pr shows the same
def test_the_gradient_of_an_async_input_is_lost_and_waiting_keeps_it(train):
    lost = parse_case_id("atp2-nowait-bf16-graph-v2048-gb2-s1-b16")
    kept = replace(lost, layout=replace(lost.layout, wait_for_embedding=True))

    def norm(case):
        sketches = train(case, probes=("sketches",))[0].sketches
        (grad,) = [each for each in sketches if each.fqn == "tok_embeddings.weight" and each.kind == "grad"]
        return grad.norm_squared

    assert norm(lost) == 0
    assert norm(kept) > 0


def test_nothing_of_async_tp_is_left_in_other_runs(train):
    """The zygote compiled a case with async TP before it forked these ranks."""
    traces = train(parse_case_id("tp2-bf16-graph-v2048-gb2-s1-b16"), probes=("graphs",))
    for trace in traces:
        assert trace.graphs.calls == ()
        assert {left.reason for graph in trace.graphs.graphs for left in graph.unfused} == {"the fusion pass is off"}
    (trace,) = train(parse_case_id("single-bf16-v2048-gb2-s1-b16"), probes=("graphs",))
    assert trace.graphs is None


@pytest.mark.parametrize(("dropout", "saves_state"), [(0.0, False), (0.1, True)])
def test_random_numbers_are_left_alone_only_where_none_are_drawn(monkeypatch, dropout: float, saves_state: bool):
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    graph.output(graph.call_function(attention, (query, query, query, dropout)))
    module = torch.fx.GraphModule({}, graph)
    monkeypatch.setattr(rng, "workarounds", [])
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert rng._only_if_any_op_draws(lambda _: True)(module) is saves_state
    assert rng.workarounds == ([] if saves_state else [rng.NAME])
    assert rng._only_if_any_op_draws(lambda _: False)(module) is False
