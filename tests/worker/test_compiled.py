"""Compiled blocks and async TP on real ranks: fused operators, live faults, what is sent, saved and repeated.

And what generated code casts and multiplies, and why a collective was left alone.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem
from msgspec.structs import replace
from torch import nn
from torch._inductor.graph import GraphLowering

from harness.checks.fp8_on import check_matmuls
from harness.checks.graph_scales import check_graph_scales
from harness.checks.graphs import ROWS, check_graphs
from harness.checks.measuring import measured
from harness.checks.memory import KEPT, NO_MARKS, check_leaks, check_live_memory, check_memory
from harness.checks.recompute import NODES, NOTHING_REPEATED, check_recompute
from harness.checks.traffic import check_traffic
from harness.engine.fork_server_engine import ForkServerEngine
from harness.expect.module_replay import allowed_in_code
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.trace.graphs import GeneratedResult, GraphTrace
from harness.verdict import Finding
from harness.worker.probes.generated import distances
from harness.worker.probes.graphs import ALL_GATHER, REDUCE_SCATTER, GraphProbe, reason
from harness.worker.process.process import PROCESS
from harness.worker.virtual import device, graph_backend
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
def fused() -> Iterator[ForkServerEngine]:
    with ForkServerEngine("tests.worker.fusedprogram") as fork_server:
        yield fork_server


@pytest.fixture(scope="module", params=["shared", "gloo"])
def operators(
    request: pytest.FixtureRequest, fused: ForkServerEngine, tmp_path_factory: pytest.TempPathFactory
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


def test_an_eager_run_has_no_graphs(train):
    """The fork server has imported what it takes."""
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


CASE = parse_case_id("single-tensorwise-inductor-v2048-s1-b16")


def cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As torchao's graph has it."""
    scale = (448.0 / tensor.abs().max().to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    return (tensor.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.reciprocal()


class Block(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (a, scale_a), (b, scale_b) = cast(nn.functional.silu(x)), cast(weight)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16) + 1


@torch._inductor.config.patch(fx_graph_cache=False)
def recorded() -> GraphTrace:
    device.install()
    torch.compiler.reset()
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with torch.no_grad(), GraphProbe(CASE, torch.device("cpu")) as probe:
        probe.begin_step(1)
        torch.compile(Block(), fullgraph=True)(draw(64, 32).bfloat16(), draw(48, 32).bfloat16())
        trace = probe.result()
    assert trace is not None
    return trace


def too_far(trace: GraphTrace) -> list[GeneratedResult]:
    return [
        result for result in trace.generated if not result.distance <= allowed_in_code(CASE, result, emulated=False)
    ]


def test_casts_matmuls_and_results_of_generated_code_are_recorded() -> None:
    trace = recorded()
    assert [(graph_cast.target_dtype, graph_cast.mismatched) for graph_cast in trace.casts] == 2 * [
        ("float8_e4m3fn", 0)
    ]
    assert not trace.unknown_casts
    (matmul,) = trace.matmuls
    assert sorted(matmul.a_casts + matmul.b_casts) == [1, 2]
    assert {result.tensor for result in trace.generated} == {"a", "b", "scale of a", "scale of b", "result"}
    assert too_far(trace) == []


def test_code_that_computes_something_else_than_its_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = GraphLowering.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        result = stock(self, target, args, kwargs)
        wrong = target is torch.ops.aten.exp.default
        return stock(self, torch.ops.aten.mul.Tensor, (result, 1.2), {}) if wrong else result

    monkeypatch.setattr(GraphLowering, "call_function", call_function)
    assert "a" in {result.tensor for result in too_far(recorded())}


@pytest.mark.parametrize("values", [torch.ones(4, 8), torch.full((4, 8), 2.0**-126)])
def test_code_with_values_where_its_graph_has_zeros_is_infinitely_far_off(values: torch.Tensor) -> None:
    zeros = torch.zeros(4, 8)
    assert distances(values, zeros) == (math.inf, math.inf)
    assert distances(zeros, zeros) == (0.0, 0.0)
    assert distances(zeros, values) == (1.0, 1.0)


def test_a_value_that_is_not_finite_has_no_distance() -> None:
    values = torch.ones(4, 8)
    values[1, 2] = math.nan
    assert all(map(math.isnan, distances(values, torch.ones(4, 8))))


aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Build = Callable[[torch.fx.Graph], torch.fx.Node]


@pytest.fixture
def _pass_is_on(monkeypatch):
    monkeypatch.setattr(symm_mem, "_is_test_mode", True)
    monkeypatch.setattr(symm_mem, "_mocked_group_names", {"tp"})
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        yield


def matmul(graph: torch.fx.Graph, name: str = "a") -> torch.fx.Node:
    return graph.call_function(aten.mm.default, (graph.placeholder(name), graph.placeholder(f"{name}_b")))


def scattered(graph: torch.fx.Graph, source: torch.fx.Node, group: str = "tp") -> torch.fx.Node:
    parts = graph.call_function(
        aten.split.Tensor, (graph.call_function(aten.reshape.default, (source, [2, 4, 8])), 2, 1)
    )
    whole = graph.call_function(aten.cat.default, ([parts],))
    node = graph.call_function(REDUCE_SCATTER, (whole, "sum", 2, group))
    graph.call_function(c10d.wait_tensor.default, (node,))
    return node


def of_a_sum(graph: torch.fx.Graph) -> torch.fx.Node:
    return scattered(graph, graph.call_function(aten.add.Tensor, (matmul(graph), matmul(graph, "c"))))


def of_a_cast(graph: torch.fx.Graph) -> torch.fx.Node:
    return scattered(graph, graph.call_function(aten._to_copy.default, (matmul(graph),), {"dtype": torch.float32}))


def of_a_matmul_with_two_users(graph: torch.fx.Graph) -> torch.fx.Node:
    product = matmul(graph)
    graph.call_function(aten.relu.default, (product,))
    return scattered(graph, product)


def saved(graph: torch.fx.Graph) -> torch.fx.Node:
    node = scattered(graph, matmul(graph))
    graph.output((node,))
    return node


def of_no_matmul(graph: torch.fx.Graph) -> torch.fx.Node:
    return scattered(graph, graph.call_function(aten.relu.default, (graph.placeholder("a"),)))


def of_another_group(graph: torch.fx.Graph) -> torch.fx.Node:
    return scattered(graph, matmul(graph), group="dp")


def gather(graph: torch.fx.Graph) -> tuple[torch.fx.Node, torch.fx.Node]:
    node = graph.call_function(ALL_GATHER, (graph.placeholder("a"), 2, "tp"))
    node.meta["val"] = torch.empty(4, 8, dtype=torch.bfloat16)
    return node, graph.call_function(c10d.wait_tensor.default, (node,))


def cast_after_the_gather(graph: torch.fx.Graph) -> torch.fx.Node:
    node, whole = gather(graph)
    graph.call_function(aten.abs.default, (whole,))
    return node


def viewed_into_a_matmul(graph: torch.fx.Graph) -> torch.fx.Node:
    node, whole = gather(graph)
    view = graph.call_function(aten.reshape.default, (whole, [4, 8]))
    graph.call_function(aten.mm.default, (view, graph.placeholder("b")))
    return node


@pytest.mark.usefixtures("_pass_is_on")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (of_a_sum, "it sums several matmuls"),
        (of_a_cast, "a cast stands between the matmul and the reduce-scatter"),
        (of_a_matmul_with_two_users, "the matmul has another user"),
        (saved, "saved for backward"),
        (of_no_matmul, "its input is no matmul, but aten.relu.default"),
        (of_another_group, "symmetric memory is not enabled for its process group"),
        (
            cast_after_the_gather,
            "it gathers bfloat16, and what it gathers goes into aten.abs.default before any matmul",
        ),
        (viewed_into_a_matmul, "the pass does not know this way from gather to matmul"),
    ],
)
def test_the_graph_tells_why(build: Build, words: str):
    assert words in reason(build(torch.fx.Graph()))


@pytest.mark.usefixtures("_pass_is_on")
def test_a_pass_that_is_off_is_the_first_reason():
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        assert reason(of_another_group(torch.fx.Graph())) == "the fusion pass is off"
