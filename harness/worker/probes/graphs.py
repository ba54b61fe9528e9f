"""Records what compilation made of the blocks, and holds every fused operator against torch's reference.

The graphs are seen where inductor hands them to a user's pass, after its own. A fused operator that ran is repeated in
its reference form, unfused and on the same inputs: a row that is not the reference's is looked for among the rows of
all ranks, so that a swap says where the row belongs.
"""

from collections.abc import Iterator
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.matrix.layout import axis_of_group
from harness.matrix.numerics import gradients_are_followed
from harness.trace.graphs import Collective, FusedCall, FusedNode, GraphRecord, GraphTrace, Phase, Unfused, WrongRow
from harness.worker.dispatch_hooks import fused
from harness.worker.dispatch_hooks.collectives import resolve_group
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.generated import GeneratedCodeWatcher
from harness.worker.probes.graph_casts import GradientWatcher, GraphCastWatcher
from harness.worker.probes.partitions import PartitionWatcher
from harness.worker.probes.probe import Probe
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.names import dtype_name
from harness.worker.tensors.reduction import gathered_copies
from harness.worker.virtual import graph_backend
from harness.worker.virtual import symm_mem as virtual_symm_mem

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_prims = torch.ops.prims

ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
MATMULS = frozenset({_aten.mm.default, _aten._scaled_mm.default, _aten._scaled_mm_v2.default})
_CASTS = frozenset({_aten._to_copy.default, _prims.convert_element_type.default})
# Operators that move elements and change none.
_MOVES = frozenset(
    {
        _aten.reshape.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.cat.default,
        _aten.slice.Tensor,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.clone.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.select.int,
        _c10d.wait_tensor.default,
        getitem,
    }
)


def group_name(node: torch.fx.Node) -> str:
    """Return the process group of an all-gather or a reduce-scatter: its last argument."""
    return str(node.args[-1])


def reason(node: torch.fx.Node) -> str:
    """Return why `node`, an all-gather or a reduce-scatter, stands in the graph by itself."""
    if not torch._inductor.config._micro_pipeline_tp:
        return "the fusion pass is off"
    enabled: Any = symm_mem.is_symm_mem_enabled_for_group
    if not enabled(group_name(node)):
        return "symmetric memory is not enabled for its process group"
    return _unfused_scatter(node) if node.target is REDUCE_SCATTER else _unfused_gather(node)


def _unfused_scatter(node: torch.fx.Node) -> str:
    producer = _produced_by(node)
    if producer.target in _CASTS:
        return "a cast stands between the matmul and the reduce-scatter"
    if producer.target is _aten.add.Tensor:
        return "it sums several matmuls"
    if producer.target in MATMULS:
        if len(producer.users) > 1:
            return "the matmul has another user"
        if any(user.op == "output" for user in node.users):
            return "what it scatters is saved for backward before it has arrived"
        return "the pass does not know this way from matmul to scatter"
    return f"its input is no matmul, but {producer.target}"


def _unfused_gather(node: torch.fx.Node) -> str:
    consumers = {user.target for user in _consumed_by(node)}
    if consumers & MATMULS:
        return "the pass does not know this way from gather to matmul (local batch 1 takes another one)"
    dtype, names = dtype_name(node.meta["val"].dtype), ", ".join(sorted(map(str, consumers)))
    return f"it gathers {dtype}, and what it gathers goes into {names} before any matmul"


def _produced_by(node: torch.fx.Node) -> torch.fx.Node:
    """Return the operator whose elements `node` gets."""
    source = node.all_input_nodes[0]
    while source.target in _MOVES:
        source = source.all_input_nodes[0]
    return source


def _consumed_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the operators that get the elements of `node`."""
    for user in node.users:
        if user.target in _MOVES:
            yield from _consumed_by(user)
        elif user.op != "output":
            yield user


# Rounding of sums in another order, relative to the row: results are rounded once from at least float32.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
_COLLECTIVES: dict[Any, Collective] = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}


class GraphProbe(Probe):
    """Records a `GraphTrace`; None of a run that compiles nothing."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._graphs: list[GraphRecord] = []
        self._calls: dict[tuple[Any, ...], FusedCall] = {}
        self._casts = GraphCastWatcher(case.float8.traits)
        self._partitions = PartitionWatcher()
        self._gradients = GradientWatcher(case)
        self._generated = GeneratedCodeWatcher(self._casts, self._gradients, self._partitions.after_passes)

    def install(self) -> None:
        self._partitions.install(self.replace)
        if self._case.compile == "inductor":
            self._generated.install(self)
        self.observe(graph_backend.observers, self._casts)
        self.observe(graph_backend.graph_observers, self._partitions.after_passes)
        self.observe(fused.observers, self._record_call)
        self.replace(torch._inductor.config, "post_grad_custom_post_pass", self._record_graph)

    def attach(self, model: torch.nn.Module) -> None:
        self._gradients.attach(model)

    @torch.no_grad()
    def after_backward(self, model: torch.nn.Module) -> None:
        if gradients_are_followed(self._case):
            self._gradients.after_backward(model, self._step)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._casts.begin_step(step)
        self._generated.begin_step(step)

    def result(self) -> GraphTrace | None:
        """Graphs in the order of compilation, calls in the order of their first execution."""
        if self._case.compile == "none":
            return None
        return GraphTrace(
            graphs=tuple(self._graphs),
            calls=tuple(self._calls.values()),
            casts=tuple(self._casts.casts),
            unknown_casts=tuple(self._casts.unknown),
            matmuls=tuple(self._casts.matmuls),
            generated=tuple(self._generated.results),
            gradients=tuple(self._gradients.distances),
            emulates_roundings=self._generated.emulates_roundings,
            partitions=tuple(self._partitions.records),
            workarounds=tuple(sorted(PROCESS.workarounds)),
        )

    # Graphs.

    def _record_graph(self, graph: torch.fx.Graph) -> None:
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        backward = any("tangent" in node.name for node in graph.find_nodes(op="placeholder"))
        self._graphs.append(
            GraphRecord(
                phase="backward" if backward else "forward",
                fused=tuple(self._fused(node) for node in nodes if _is_fused(node)),
                unfused=tuple(self._unfused(node) for node in nodes if node.target in _COLLECTIVES),
                constants=tuple(
                    f"{_name(node)} {value!r}"
                    for node in nodes
                    for value in (*node.args, *node.kwargs.values())
                    if isinstance(value, float)
                ),
            )
        )

    def _fused(self, node: torch.fx.Node) -> FusedNode:
        assert isinstance(node.target, torch._ops.OpOverload)
        given = fused.naming(node.target)(node.args, node.kwargs)
        scale = given.get("A_scale")
        return FusedNode(
            operator=_name(node).removeprefix("symm_mem::"),
            collective="all_gather" if "gather_dim" in given else "reduce_scatter",
            axis=self._axis(given["group_name"]),
            a_shape=_shape(given.get("A")),
            a_scale_shape=None if scale is None else _shape(scale),
        )

    def _unfused(self, node: torch.fx.Node) -> Unfused:
        value = _value(node.all_input_nodes[0])
        return Unfused(
            collective=_COLLECTIVES[node.target],
            axis=self._axis(group_name(node)),
            shape=tuple(value.shape),
            dtype=dtype_name(value.dtype),
            reason=reason(node),
        )

    def _axis(self, name: str) -> str:
        ranks = dist.get_process_group_ranks(resolve_group(name))
        return axis_of_group(self._case.layout, dist.get_rank(), tuple(ranks))

    # Executions.

    def _record_call(self, operator: str, given: dict[str, Any], result: Any) -> None:
        with torch.no_grad():
            # In test mode the reference itself ran: there is nothing to hold it against.
            comparison = _Comparison() if symm_mem._is_test_mode else _compared(operator, given, result)
        phase: Phase = "backward" if in_backward() else "forward"
        key = (self._step, phase, operator, given["A"].shape, len(given.get("Bs", [None])))
        before = self._calls.get(key)
        self._calls[key] = FusedCall(
            step=self._step,
            phase=phase,
            operator=operator,
            collective="all_gather" if "gather_dim" in given else "reduce_scatter",
            times=1 + (before.times if before else 0),
            rows=comparison.rows + (before.rows if before else 0),
            wrong_rows=comparison.wrong_rows + (before.wrong_rows if before else 0),
            example=before.example if before and before.example else comparison.example,
        )


class _Comparison(NamedTuple):
    rows: int = 0
    wrong_rows: int = 0
    example: WrongRow | None = None


def _compared(operator: str, given: dict[str, Any], result: Any) -> _Comparison:
    """Return the rows of every result of a fused operator against those of its reference, on the same inputs."""
    with virtual_symm_mem.reference(), unobserved():
        expected = virtual_symm_mem.run(operator, given)
        group = resolve_group(given["group_name"])
        scattered = "gather_dim" not in given
        pairs = list(zip(_tensors(result), _tensors(expected), strict=True))
        gathered = [gathered_copies(right, group) if scattered else [right] for _, right in pairs]
    comparisons = [
        _compare_rows(left, right, candidates) for (left, right), candidates in zip(pairs, gathered, strict=True)
    ]
    return _Comparison(
        rows=sum(comparison.rows for comparison in comparisons),
        wrong_rows=sum(comparison.wrong_rows for comparison in comparisons),
        example=next((comparison.example for comparison in comparisons if comparison.example), None),
    )


def _compare_rows(left: torch.Tensor, right: torch.Tensor, candidates: list[torch.Tensor]) -> _Comparison:
    distances = _row_distances(left, right)
    allowed = _ROUNDING.get(right.dtype, 0.0)
    wrong = (~(distances <= allowed)).nonzero().flatten().tolist()  # NaN is wrong
    example = None
    if wrong:
        row = _rows(left)[wrong[0]]
        holds = _where_it_belongs(row, candidates, allowed)
        example = WrongRow(
            index=_index(wrong[0], right),
            distance=float(distances[wrong[0]]),
            holds_rank=None if holds is None else holds[0],
            holds_index=None if holds is None else _index(holds[1], right),
        )
    return _Comparison(distances.numel(), len(wrong), example)


def _where_it_belongs(row: torch.Tensor, candidates: list[torch.Tensor], allowed: float) -> tuple[int, int] | None:
    """(group rank, flat row) of the reference row that is nearest to `row`, if it is that row up to rounding."""
    gathered_copies = torch.cat([_rows(candidate) for candidate in candidates])
    distances = _row_distances(row.expand(gathered_copies.shape), gathered_copies)
    nearest = int(distances.argmin())
    if not distances[nearest] <= allowed:
        return None
    return divmod(nearest, len(gathered_copies) // len(candidates))


def _row_distances(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Relative to the norm of the right row, or to a hundredth of the largest where a row is nearly nothing."""
    left, right = _rows(left), _rows(right)
    norms = right.norm(dim=-1)
    return (left - right).norm(dim=-1) / norms.clamp(min=float(norms.max()) / 100 if norms.numel() else 0)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).to(torch.float64)


def _index(flat: int, tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(place) for place in np.unravel_index(flat, tensor.shape[:-1]))


def _tensors(result: Any) -> list[torch.Tensor]:
    """Return the results of matmuls, and the gathered operand if it is returned and can be a matmul's input again."""
    return [leaf for leaf in tree_leaves(result) if leaf is not None]


def _is_fused(node: torch.fx.Node) -> bool:
    return _name(node).startswith("symm_mem::fused_")


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _value(node: Any) -> torch.Tensor:
    """Return what a node gives; of a change of strides that the pass put in, what it was made from."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    value: torch.Tensor = node.meta["val"]
    return value


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(_value(node).shape)
