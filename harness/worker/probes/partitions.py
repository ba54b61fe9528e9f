"""Watches how the partitioner divides joint graphs: what forward saves, and what backward computes again.

The marks of checkpointing are those of the joint graph before the partitioner has it, because the partitioner changes
some. What it computes again it copies into the backward graph under the same name, so equal names must be equal nodes:
right after the partition, and after all passes except for what these put in.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

import torch
from msgspec import structs
from torch._functorch.partitioners import must_recompute
from torch._inductor import compile_fx

from harness.trace.graphs import KeptTensor, PartitionRecord, UnequalNode
from harness.worker.tensors.names import dtype_name
from harness.worker.virtual import graph_backend

_PARTITION = "fp8_harness_partition"  # the key of node.meta that says which partition a graph is of

Nodes = dict[str, torch.fx.Node]
_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten.view.dtype, _aten.reshape.default, _aten._unsafe_view.default})


class _Side(NamedTuple):
    """One graph of a partition: its operators, and all names that it had before the passes."""

    operators: Nodes
    names: AbstractSet[str]
    unchanged: Mapping[str, str]  # views that change nothing, which passes remove: the node that each is


class PartitionWatcher:
    """Fills `records`, for the backend `graph` and for inductor."""

    def __init__(self) -> None:
        self.records: list[PartitionRecord] = []
        self._divided: list[tuple[_Side, _Side]] = []  # forward and backward graph of every partition
        self._passed: dict[int, _Side] = {}  # forward graphs that have been through the passes, by partition

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Watch the partitioner; `replace`: the probe's."""
        for owner in (graph_backend, compile_fx):
            stock = owner.min_cut_rematerialization_partition
            replace(owner, "min_cut_rematerialization_partition", self._watched(stock))

    def _watched(self, stock: Any) -> Any:
        def partition(module: torch.fx.GraphModule, inputs: Any, *rest: Any, **given: Any) -> Any:
            marked = frozenset(node.name for node in module.graph.nodes if must_recompute(node))
            forward, backward = stock(module, inputs, *rest, **given)
            self._record(forward.graph, backward.graph, marked, given["num_fwd_outputs"])
            return forward, backward

        return partition

    def _record(
        self, forward: torch.fx.Graph, backward: torch.fx.Graph, marked: AbstractSet[str], outputs: int
    ) -> None:
        unchanged = _unchanged(forward) | _unchanged(backward)
        before, after = (
            _Side(_operators(graph), {node.name for node in graph.nodes}, unchanged) for graph in (forward, backward)
        )
        for graph in (forward, backward):
            graph.find_nodes(op="placeholder")[0].meta[_PARTITION] = len(self._divided)
        self._divided.append((before, after))
        given: Any = forward.output_node().args[0]
        tensors = [node for node in given[outputs:] if isinstance(node.meta.get("val"), torch.Tensor)]
        saved: list[torch.fx.Node] = [node for node in tensors if node.op == "call_function"]
        kept = [node for node in saved if node.name in marked]
        self.records.append(
            PartitionRecord(
                forward=len(before.operators),
                marked=len(before.operators.keys() & marked),
                saved_bytes=sum(node.meta["val"].nbytes for node in saved),
                kept=tuple(_kept(node) for node in kept),
                repeated=len(_repeated(before, after)),
                repeated_in_passes=0,
                unequal=tuple(_unequal(before, after, "partition")),
            )
        )

    def after_passes(self, graph: torch.fx.Graph) -> None:
        """A graph as it is executed or lowered. A backward graph may come late, when backward first needs it."""
        inputs = graph.find_nodes(op="placeholder")
        place = next((node.meta[_PARTITION] for node in inputs if _PARTITION in node.meta), None)
        if place is None:
            return  # it was not divided: nothing in it has a gradient
        forward, backward = self._divided[place]
        if not any("tangent" in node.name for node in inputs):
            self._passed[place] = forward._replace(operators=_operators(graph))
            return
        before, after = self._passed.pop(place), backward._replace(operators=_operators(graph))
        record = self.records[place]
        self.records[place] = structs.replace(
            record,
            repeated_in_passes=len(_repeated(before, after)),
            unequal=(*record.unequal, *_unequal(before, after, "passes")),
        )


def _operators(graph: torch.fx.Graph) -> Nodes:
    return {node.name: node for node in graph.nodes if node.op == "call_function"}


def _unchanged(graph: torch.fx.Graph) -> dict[str, str]:
    sources: dict[str, str] = {}
    for node in graph.nodes:
        if node.target in _VIEWS:
            source = node.all_input_nodes[0]
            made, given = node.meta["val"], source.meta["val"]
            if (made.shape, made.dtype) == (given.shape, given.dtype):
                sources[node.name] = sources.get(source.name, source.name)
    return sources


def _kept(node: torch.fx.Node) -> KeptTensor:
    value: torch.Tensor = node.meta["val"]
    return KeptTensor(
        node=node.name,
        operator=str(node.target),
        dtype=dtype_name(value.dtype),
        shape=tuple(value.shape),
        nbytes=value.nbytes,
    )


def _repeated(before: _Side, after: _Side) -> list[str]:
    """Return the operators that both graphs have under the same name, which no pass has made."""
    known = before.names & after.names
    return [name for name in after.operators if name in before.operators and name in known]


def _unequal(before: _Side, after: _Side, moment: Literal["partition", "passes"]) -> Iterator[UnequalNode]:
    for name in _repeated(before, after):
        one, other = before.operators[name], after.operators[name]
        if not _equal(_form(one, before), _form(other, after)):
            yield UnequalNode(node=name, moment=moment, forward=_written(one), backward=_written(other))


def _written(node: torch.fx.Node) -> str:
    keywords = [f"{name}={value}" for name, value in node.kwargs.items()]
    return f"{node.target}({', '.join([*map(str, node.args), *keywords])})"


_MADE = object()  # a wildcard for an argument that a pass created: it equals any other node


def _form(node: torch.fx.Node, side: _Side) -> list[object]:
    """Operator and arguments: literals as text, nodes by name. An operator in place is the one out of place."""
    leaves, structure = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    arguments = [
        _MADE
        if isinstance(leaf, torch.fx.Node) and leaf.name not in side.names
        else side.unchanged.get(str(leaf), str(leaf))
        for leaf in (*leaves, structure)
    ]
    return [str(node.target).replace("_.", "."), *arguments]


def _equal(one: list[object], other: list[object]) -> bool:
    return len(one) == len(other) and all(
        left is _MADE or right is _MADE or left == right for left, right in zip(one, other, strict=True)
    )
