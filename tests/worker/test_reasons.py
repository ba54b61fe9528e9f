"""Why a collective was left alone: every reason on the smallest graph that has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem

from harness.worker.probes.graphs import ALL_GATHER, REDUCE_SCATTER, reason

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Build = Callable[[torch.fx.Graph], torch.fx.Node]


@pytest.fixture(autouse=True)
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


def test_a_pass_that_is_off_is_the_first_reason():
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        assert reason(of_another_group(torch.fx.Graph())) == "the fusion pass is off"
