"""Compiled blocks and async TP on real ranks: the fused operators, torch's live faults, and what leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from harness.checks.graphs import check_graphs
from harness.checks.wire import check_wire
from harness.checks.witnesses import Witnesses
from harness.engine.wire import Job
from harness.engine.zygote import ZygoteEngine
from harness.spec.caseid import parse_case_id
from harness.spec.fusion import executed_scaled_mm_calls
from harness.trace import Run
from harness.worker.virtual import rng

FIX = f"{Path(__file__).parents[2] / 'cases' / 'fixes' / 'scattered_rows.py'}:apply"
PROBES = ("sketches", "traffic", "graphs")
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)

# Relative to the row; what bfloat16 results and partial sums may be off.
ROUNDING = 0.02
# torch 2.13: rows are scattered by batch when the operand is collapsed and the scatter dim is the second one.
WRONG = {
    "pipelined collapsed tensorwise, reduce-scatter dim 1",
    "pipelined collapsed rowwise, reduce-scatter dim 1",
}


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, float]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        with ZygoteEngine("fusedprogram") as warm:
            folder = tmp_path_factory.mktemp("fused")
            outcome = warm.run(Job(job_id="fused", world_size=4, payload=b"", deadline_s=200, folder=str(folder)))
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
    yield [json.loads(rank.payload or b"") for rank in outcome.ranks]


def test_fused_operators_are_a_matmul_and_a_collective(operators: list[dict[str, float]]):
    assert all(len(report) == 2 * 2 * 8 for report in operators)
    off = {name for report in operators for name, worst in report.items() if not worst <= ROUNDING}
    assert off == WRONG


def test_rows_scattered_by_batch_are_no_rounding(operators: list[dict[str, float]]):
    assert all(report[name] > 10 * ROUNDING for report in operators for name in WRONG)


def test_the_live_fault_is_located_and_the_candidate_fix_mends_it(train):
    case = parse_case_id("atp2-rowwise-ac.full-graph-v2048-gb2-s1-b16")
    broken = Run(traces=train(case, probes=PROBES), failures=())
    findings = [finding for finding in check_graphs(case, broken, WITNESSES) if "gives other rows" in finding.message]
    assert findings
    assert all("fused_scaled_matmul_reduce_scatter" in finding.message for finding in findings)
    assert findings[0].found is not None
    assert "row [1, 0] of this rank holds what belongs into row [0, 0] of TP rank 1" in findings[0].found
    mended = Run(traces=train(case, probes=PROBES, injections=(FIX,)), failures=())
    assert check_graphs(case, mended, WITNESSES) == []
    reference = msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, symm_mem="fallback"))
    expected = train(reference, probes=("sketches",))
    assert [trace.sketches for trace in mended.traces] == [trace.sketches for trace in expected]


@pytest.mark.parametrize(
    "text",
    [
        "fsdp2-atp2-rowwise-ac.op-graph-v2048-gb2-s2-b16",
        "atp2-fallback-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb2-s2-f64",
        "tp2-nosp-rowwise_with_gw_hp-ac.op-graph-v2048-gb2-s2-b16",
    ],
)
def test_fusions_traffic_and_matmuls_are_those_of_the_formulas(train, text: str):
    case = parse_case_id(text)
    traces = train(case, probes=PROBES)
    run = Run(traces=traces, failures=())
    assert check_graphs(case, run, WITNESSES) == []
    assert check_wire(case, run, WITNESSES) == []
    assert {step.scaled_mm_calls for trace in traces for step in trace.steps} == {executed_scaled_mm_calls(case)}
    checkpointed = case.checkpointing.mode != "none"
    assert all(trace.graphs.workarounds == ((rng.NAME,) if checkpointed else ()) for trace in traces)


def test_probes_change_no_bit_of_a_compiled_run(train):
    case = parse_case_id("atp2-tensorwise-graph-v2048-gb2-s2-b16")
    watched, alone = train(case, probes=PROBES), train(case, probes=("sketches",))
    assert [trace.sketches for trace in watched] == [trace.sketches for trace in alone]


def test_the_gradient_of_an_async_input_is_lost_and_waiting_keeps_it(train):
    lost = parse_case_id("atp2-nowait-bf16-graph-v2048-gb2-s1-b16")
    kept = msgspec.structs.replace(lost, layout=msgspec.structs.replace(lost.layout, wait_for_embedding=True))

    def norm(case):
        sketches = train(case, probes=("sketches",))[0].sketches
        (grad,) = [each for each in sketches if each.fqn == "tok_embeddings.weight" and each.kind == "grad"]
        return grad.norm_squared

    assert norm(lost) == 0
    assert norm(kept) > 0


def test_nothing_of_async_tp_is_left_in_other_runs(train):
    """The warm process compiled a case with async TP before it forked these ranks."""
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
    monkeypatch.setattr(rng, "skipped", [])
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert rng._asked_again(lambda _: True)(module) is saves_state
    assert rng.skipped == ([] if saves_state else [rng.NAME])
    assert rng._asked_again(lambda _: False)(module) is False
