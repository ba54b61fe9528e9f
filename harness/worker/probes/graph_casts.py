"""Watches the casts to float8 inside of compiled graphs, as the graph backend executes them.

torchao's cast is four operators in a graph: to float32, times the scale, clamp, to float8 (`ToFloat8ConstrFunc` in
torchao 0.18). The operands of the first two are kept until the last one ran, then measured as those of an eager cast.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from harness.trace.graphs import GraphCast, Phase, UnknownCast
from harness.worker.probes.cast_numbers import Cast, dtype_name, measure_cast, summarize_scale
from harness.worker.probes.probe import in_backward
from harness.worker.virtual.collectives import FLOAT8

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.t.default, _aten.reshape.default, _aten.view.default, _aten.permute.default})


class _Chain(NamedTuple):
    widened: torch.fx.Node
    multiplied: torch.fx.Node


class GraphCastWatcher:
    """Called with every executed node; `casts` or `unknown` grows by one for every conversion to float8."""

    def __init__(self) -> None:
        self.casts: list[GraphCast] = []
        self.unknown: list[UnknownCast] = []
        self._step, self._order = 0, 0
        self._sources: dict[torch.fx.Node, torch.Tensor] = {}
        self._scales: dict[torch.fx.Node, torch.Tensor] = {}

    def begin_step(self, step: int) -> None:
        self._step, self._order = step, 0

    def __call__(self, node: torch.fx.Node, args: tuple[Any, ...], result: Any) -> None:
        if node.op == "output":
            self._forget()
        if node in _needed(node.graph):
            self._keep(node, args)
        if _is_cast(node):
            with torch.no_grad():
                self._record(node, result)

    def _forget(self) -> None:
        """Drop all tensors of a finished graph, so that the probe keeps none alive."""
        self._sources.clear()
        self._scales.clear()

    def _keep(self, node: torch.fx.Node, args: tuple[Any, ...]) -> None:
        self._sources[node] = args[0]
        if node.target is _aten.mul.Tensor:
            self._scales[node] = args[1]

    def _record(self, node: torch.fx.Node, bits: torch.Tensor) -> None:
        self._order += 1
        phase: Phase = "backward" if in_backward() else "forward"
        seen: dict[str, Any] = {
            "step": self._step,
            "order": self._order,
            "phase": phase,
            "fqn": _fqn(node),
            "target_dtype": dtype_name(bits.dtype),
            "shape": tuple(bits.shape),
        }
        chain = _chain(node)
        if isinstance(chain, str):
            self.unknown.append(UnknownCast(**seen, missing=chain))
            return
        source, scale = self._sources[chain.widened], self._scales[chain.multiplied]
        summary = summarize_scale(scale)
        # Equal casts of one graph are merged already. Sources die at once here, so none is recognized by its storage.
        measured = measure_cast(Cast(source, bits, scale, _scaled_dim(scale, source)))
        self.casts.append(
            GraphCast(
                **seen,
                is_weight=_is_parameter(chain.widened),
                scale=summary,
                **{name: value for name, value in measured._asdict().items() if name in GraphCast.__struct_fields__},
            )
        )


@functools.lru_cache(maxsize=64)
def _needed(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    chains = [_chain(node) for node in graph.nodes if _is_cast(node)]
    return frozenset(node for chain in chains if isinstance(chain, _Chain) for node in chain)


def _is_cast(node: torch.fx.Node) -> bool:
    return node.target is _aten._to_copy.default and node.kwargs.get("dtype") in FLOAT8


def _chain(node: torch.fx.Node) -> _Chain | str:
    """The cast that ends in `node`; what is missing of it where the conversion is not torchao's."""
    clamp = node.args[0]
    if not isinstance(clamp, torch.fx.Node) or clamp.target is not _aten.clamp.default:
        return f"a clamp before it, not {_operator(clamp)}"
    multiplied = clamp.args[0]
    if not isinstance(multiplied, torch.fx.Node) or multiplied.target is not _aten.mul.Tensor:
        return f"a product with the scale before its clamp, not {_operator(multiplied)}"
    widened = multiplied.args[0]
    is_widened = isinstance(widened, torch.fx.Node) and widened.target is _aten._to_copy.default
    # a float32 source is not widened: it goes into the product as it is, and counts as its own
    return _Chain(widened if is_widened else multiplied, multiplied)  # type: ignore[arg-type]


def _operator(node: Any) -> str:
    return str(node.target) if isinstance(node, torch.fx.Node) else repr(node)


def _scaled_dim(scale: torch.Tensor, source: torch.Tensor) -> int | None:
    """The dim that one scale spans; None for one scale of the whole tensor. A dim of size 1 is spanned by any scale."""
    spanned = (dim for dim, size in enumerate(scale.shape) if size == 1 != source.shape[dim])
    return None if scale.numel() == 1 else next(spanned)


def _is_parameter(node: torch.fx.Node) -> bool:
    source = node.all_input_nodes[0]
    while source.target in _VIEWS:
        source = source.all_input_nodes[0]
    return source.op == "placeholder" and source.name.startswith("primals")


def _fqn(node: torch.fx.Node) -> str:
    """The module whose code the node comes from, as the compiler remembers it; "?" where it does not."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return str(names[-1]).replace("L['self'].", "") if names else "?"
