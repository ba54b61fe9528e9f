"""Watches the casts to float8 and the scaled matmuls inside of compiled graphs, as their operators are executed.

torchao's cast is four operators in a graph: to float32, times the scale, clamp, to float8 (`ToFloat8ConstrFunc` in
torchao 0.18). The operands of the first two are kept until the last one ran, then measured as those of an eager cast.
Inductor decomposes them: a clamp is one to the minimum and one to the maximum. A cast to MXFP8 is one operator.
"""

import functools
import re
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.matrix.recipes import BLOCK, RecipeTraits
from harness.trace.graphs import GraphCast, GraphMatmul, Phase, UnknownCast
from harness.worker.probes.cast_numbers import Cast, measure_cast, summarize_scale
from harness.worker.process.process import in_backward
from harness.worker.tensors.digests import bytes_of, fingerprint
from harness.worker.tensors.names import dtype_name
from harness.worker.virtual.memory import FLOAT8
from harness.worker.virtual.scaled_mm import unswizzled_scales

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_VIEWS = frozenset({_aten.t.default, _aten.reshape.default, _aten.view.default, _aten.permute.default})

# The operators that cast to MXFP8: the contracted dim, and which results are the data and the scales.
_BLOCK_CASTS = {"torchao.triton_to_mxfp8_dim0.default": (-1, 0, 1), "torchao.mxfp8_quantize.default": (0, 1, 3)}


class _Chain(NamedTuple):
    widened: torch.fx.Node
    multiplied: torch.fx.Node


class GraphCastWatcher:
    """Called with every executed node: records conversions to float8, as `casts` or `unknown`, and scaled matmuls."""

    def __init__(self, traits: RecipeTraits) -> None:
        self._traits = traits
        self.casts: list[GraphCast] = []
        self.unknown: list[UnknownCast] = []
        self.matmuls: list[GraphMatmul] = []
        self._step, self._order = 0, 0
        self._cast_to: defaultdict[str, list[int]] = defaultdict(list)  # casts of this step by their values
        self._sources: dict[torch.fx.Node, torch.Tensor] = {}
        self._scales: dict[torch.fx.Node, torch.Tensor] = {}

    def begin_step(self, step: int) -> None:
        self._step, self._order = step, 0
        self._cast_to.clear()

    def __call__(self, node: torch.fx.Node, args: tuple[Any, ...], result: Any) -> None:
        if node.op == "output":
            self._forget()
        if node in _needed(node.graph):
            self._keep(node, args)
        if _is_cast(node):
            with torch.no_grad():
                self._record(node, result)
        if str(node.target) in _BLOCK_CASTS:
            with torch.no_grad():
                self._record_blocks(node, args[0], result)
        if node.target is _aten._scaled_mm.default:
            self._record_matmul(node, args)

    def _forget(self) -> None:
        """Drop all tensors of a finished graph, so that the probe keeps none alive."""
        self._sources.clear()
        self._scales.clear()

    def _keep(self, node: torch.fx.Node, args: tuple[Any, ...]) -> None:
        self._sources[node] = args[0]
        if node.target is _aten.mul.Tensor:
            self._scales[node] = args[1]

    def _record_matmul(self, node: torch.fx.Node, args: tuple[Any, ...]) -> None:
        a, b, scale_a, scale_b = args[:4]
        if self._traits.in_blocks:
            scale_a, scale_b = unswizzled_scales(a, b, scale_a, scale_b)
        self.matmuls.append(
            GraphMatmul(
                step=self._step,
                order=self._order,
                phase=phase_now(),
                fqn=fqn_of(node),
                a_scale=summarize_scale(scale_a),
                b_scale=summarize_scale(scale_b),
                a_casts=tuple(self._cast_to[_values_digest(a)]),
                b_casts=tuple(self._cast_to[_values_digest(b)]),
            )
        )

    def alias(self, bits: torch.Tensor, other: torch.Tensor) -> None:
        """Take `bits`, which generated code has in place of `other`, for results of the same casts."""
        orders = self._cast_to[_values_digest(other)]
        known = self._cast_to[_values_digest(bits)]
        known += [order for order in orders if order not in known]

    def _record(self, node: torch.fx.Node, bits: torch.Tensor) -> None:
        seen = self._seen(node, bits)
        chain = _chain(node)
        if isinstance(chain, str):
            self.unknown.append(UnknownCast(**seen, missing=chain))
            return
        source, scale = self._sources[chain.widened], self._scales[chain.multiplied]
        seen["scale_is_given"] = _origin(chain.multiplied.args[1]).op == "placeholder"
        self._add(seen, chain.widened, Cast(source, bits, scale, _scaled_dim(scale, source)))

    def _record_blocks(self, node: torch.fx.Node, source: torch.Tensor, result: tuple[torch.Tensor, ...]) -> None:
        dim, data, scale = _BLOCK_CASTS[str(node.target)]
        cast = Cast(source, result[data], result[scale], dim, BLOCK, self._traits.rounds_scales_down)
        self._add(self._seen(node, cast.bits), node, cast)

    def _seen(self, node: torch.fx.Node, bits: torch.Tensor) -> dict[str, Any]:
        self._order += 1
        return {
            "step": self._step,
            "order": self._order,
            "phase": phase_now(),
            "fqn": fqn_of(node),
            "target_dtype": dtype_name(bits.dtype),
            "shape": tuple(bits.shape),
        }

    def _add(self, seen: dict[str, Any], reads_source: torch.fx.Node, cast: Cast) -> None:
        self._cast_to[_values_digest(cast.bits)] += [self._order]
        # Equal casts of one graph are merged already. Sources die at once here, so none is recognized by its storage.
        measured = measure_cast(cast)
        self.casts.append(
            GraphCast(
                **seen,
                is_weight=_is_parameter(reads_source),
                scale=summarize_scale(cast.scale),
                **{name: value for name, value in measured._asdict().items() if name in GraphCast.__struct_fields__},
            )
        )


@functools.lru_cache(maxsize=64)
def _needed(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    chains = [_chain(node) for node in graph.nodes if _is_cast(node)]
    return frozenset(node for chain in chains if isinstance(chain, _Chain) for node in chain)


def _is_cast(node: torch.fx.Node) -> bool:
    return _target_dtype(node) in FLOAT8


def _target_dtype(node: Any) -> torch.dtype | None:
    """What a conversion converts to; None of other operators."""
    if not isinstance(node, torch.fx.Node):
        return None
    dtype = node.args[1] if node.target is _CONVERT else node.kwargs.get("dtype")
    is_conversion = node.target in {_CONVERT, _aten._to_copy.default}
    return dtype if is_conversion and isinstance(dtype, torch.dtype) else None


def phase_now() -> Phase:
    return "backward" if in_backward() else "forward"


def _values_digest(bits: torch.Tensor) -> str:
    """A fingerprint of the values without their order: graphs transpose, split and join what they have cast."""
    counts = np.bincount(np.frombuffer(bytes_of(bits), np.uint8), minlength=256)
    return fingerprint(counts.tobytes())


def _chain(node: torch.fx.Node) -> _Chain | str:
    """The cast that ends in `node`; what is missing of it where the conversion is not torchao's."""
    clamp = node.args[0]
    if isinstance(clamp, torch.fx.Node) and clamp.target is _aten.clamp_max.default:
        clamp, clamps = clamp.args[0], _aten.clamp_min.default
    else:
        clamps = _aten.clamp.default
    if not isinstance(clamp, torch.fx.Node) or clamp.target is not clamps:
        return f"a clamp before it, not {_operator(clamp)}"
    multiplied = clamp.args[0]
    if not isinstance(multiplied, torch.fx.Node) or multiplied.target is not _aten.mul.Tensor:
        return f"a product with the scale before its clamp, not {_operator(multiplied)}"
    widened = multiplied.args[0]
    is_widened = _target_dtype(widened) is torch.float32
    # a float32 source is not widened: it goes into the product as it is, and counts as its own
    return _Chain(widened if is_widened else multiplied, multiplied)  # type: ignore[arg-type]


def _operator(node: Any) -> str:
    return str(node.target) if isinstance(node, torch.fx.Node) else repr(node)


def _scaled_dim(scale: torch.Tensor, source: torch.Tensor) -> int | None:
    """The dim that one scale spans; None for one scale of the whole tensor. A dim of size 1 is spanned by any scale."""
    spanned = (dim for dim, size in enumerate(scale.shape) if size == 1 != source.shape[dim])
    return None if scale.numel() == 1 else next(spanned)


def _is_parameter(node: torch.fx.Node) -> bool:
    source = _origin(node.all_input_nodes[0])
    return source.op == "placeholder" and source.name.startswith("primals")


def _origin(node: Any) -> torch.fx.Node:
    """The node whose elements `node` has."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    origin: torch.fx.Node = node
    return origin


_OF_COMPILER = r"L\['self'\]\.|(?:__dict__\['_modules'\]|_modules)\['_checkpoint_wrapped_module'\]\."


def fqn_of(node: torch.fx.Node) -> str:
    """The module whose code the node comes from, as the compiler remembers it; "?" where it does not."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return re.sub(_OF_COMPILER, "", str(names[-1])) if names else "?"
