"""What generated code casts and multiplies is recorded from its graph, repeated beside it, and held against it."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._inductor.graph import GraphLowering

from harness.expect.compiled import allowed_distance
from harness.matrix.caseid import parse_case_id
from harness.trace.graphs import GeneratedResult, GraphTrace
from harness.worker.probes.generated import distances
from harness.worker.probes.graphs import GraphProbe
from harness.worker.virtual import device

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
        result for result in trace.generated if not result.distance <= allowed_distance(CASE, result, emulated=False)
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
