"""Watches the casts to float8 and the scaled matmuls inside of compiled graphs, as their operators are executed.

torchao's cast is four operators in a graph: to float32, times the scale, clamp, to float8 (`ToFloat8ConstrFunc` in
torchao 0.18). The operands of the first two are kept until the last one ran, then measured as those of an eager cast.
Inductor decomposes them: a clamp is one to the minimum and one to the maximum. A cast of blocks is one operator.

The gradients that the optimizer gets are held against those that generated code has returned. What lies between is one
rank's sum over microbatches, bit for bit, and sums over ranks, which are repeated in float64: FSDP2's, and that of
parameters that TP ranks hold alike and use for other tokens each. Clipping scales all gradients by one number, which
most of them show; whether it is the right one is for check `clipping`.
"""

import functools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from harness.matrix.case import Case
from harness.matrix.recipes import OPERATORS, TENSOR, RecipeTraits
from harness.trace.graphs import GradientDistance, GraphCast, GraphMatmul, Phase, UnknownCast
from harness.worker.probes.cast_numbers import Cast, measure_cast, summarize_scale
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.digests import bytes_of, fingerprint
from harness.worker.tensors.names import clean_fqn, dtype_name, is_compiled
from harness.worker.tensors.places import local_tensor
from harness.worker.tensors.reduction import relative_distance
from harness.worker.virtual.collectives import FLOAT8
from harness.worker.virtual.scaled_mm import scales_of_blocks

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_VIEWS = frozenset({_aten.t.default, _aten.reshape.default, _aten.view.default, _aten.permute.default})

# Where the scales are among the arguments of a scaled matmul.
_SCALES_OF_MATMULS = {
    "_scaled_mm": (2, 3),
    "_scaled_mm_v2": (2, 5),
    "blockwise_scaled_mm": (2, 4),
}


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
            self._sources.clear()  # the probe keeps no tensor of a finished graph alive
            self._scales.clear()
        if node in _needed(node.graph):
            self._sources[node] = args[0]
            if node.target is _aten.mul.Tensor:
                self._scales[node] = args[1]
        with torch.no_grad():
            if _is_cast(node):
                self._record(node, result)
            if _name(node) in OPERATORS:
                self._record_blocks(node, args[0], result)
        if _name(node) in _SCALES_OF_MATMULS:
            self._record_matmul(node, args)

    def _record_matmul(self, node: torch.fx.Node, args: tuple[Any, ...]) -> None:
        a, b = args[:2]
        scale_a, scale_b = (
            given[0] if isinstance(given, list) else given
            for given in (args[place] for place in _SCALES_OF_MATMULS[_name(node)])
        )
        if self._traits.block:
            scale_a, scale_b = scales_of_blocks(a, b, scale_a, scale_b)
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
        """Take `bits`, which generated code has instead of `other`, for results of the same casts."""
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
        operand, dim, *turned, place = OPERATORS[_name(node)]
        data, scale = (tensor.t() if turns else tensor for tensor, turns in zip(result[place], turned, strict=True))
        block = self._traits.block_of(operand) or TENSOR
        cast = Cast(source, data, scale, dim, block, self._traits.rounds_scales_down)
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


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_cast(node: torch.fx.Node) -> bool:
    return _target_dtype(node) in FLOAT8


def _target_dtype(node: Any) -> torch.dtype | None:
    """Return what a conversion converts to; None of other operators."""
    if not isinstance(node, torch.fx.Node):
        return None
    dtype = node.args[1] if node.target is _CONVERT else node.kwargs.get("dtype")
    is_conversion = node.target in {_CONVERT, _aten._to_copy.default}
    return dtype if is_conversion and isinstance(dtype, torch.dtype) else None


def phase_now() -> Phase:
    return "backward" if in_backward() else "forward"


def _values_digest(bits: torch.Tensor) -> str:
    """Return a fingerprint of the values without their order: graphs transpose, split and join what they have cast."""
    counts = np.bincount(np.frombuffer(bytes_of(bits), np.uint8), minlength=256)
    return fingerprint(counts.tobytes())


def _chain(node: torch.fx.Node) -> _Chain | str:
    """Return the cast that ends in `node`; what is missing of it where the conversion is not torchao's."""
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
    """Return the node whose elements `node` has."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    origin: torch.fx.Node = node
    return origin


_OF_COMPILER = r"L\['self'\]\.|(?:__dict__\['_modules'\]|_modules)\['_checkpoint_wrapped_module'\]\."


def fqn_of(node: torch.fx.Node) -> str:
    """Return the module whose code the node comes from, as the compiler remembers it; "?" where it does not."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return re.sub(_OF_COMPILER, "", str(names[-1])) if names else "?"


_TP = "tp"


class _Gradient(NamedTuple):
    """What the optimizer gets on this rank, and the sum of what ranks returned for it: None if nothing that fits."""

    fqn: str
    axes: tuple[str, ...]  # over which ranks are added up
    found: torch.Tensor
    returned: torch.Tensor | None = None


class GradientWatcher:
    """`distances` grows by one for every parameter of a compiled module in every step.

    A backward graph returns a gradient for every input of its forward graph. Calls come back in reverse order.
    """

    def __init__(self, case: Case) -> None:
        self.distances: list[GradientDistance] = []
        self._dp, self._tp = case.layout.dp, case.layout.tp
        self._clips = case.train.max_norm is not None
        self._forward: list[list[str | None]] = []  # of calls whose backward is to come: the names of their inputs
        self._returned: dict[str, torch.Tensor] = {}
        self._model: nn.Module | None = None

    def attach(self, model: nn.Module) -> None:
        self._model = model

    def before_call(self, inputs: Sequence[Any]) -> None:
        if self._model is None or in_backward() or PROCESS.evaluating:
            return
        parameters = {_place(param): clean_fqn(name) for name, param in self._model.named_parameters()}
        self._forward.append([parameters.get(_place(tensor)) for tensor in inputs])

    def after_call(self, outputs: Sequence[Any]) -> None:
        if not (self._forward and in_backward()):
            return
        names = self._forward.pop()
        for name, gradient in zip(names, outputs, strict=False) if len(names) == len(outputs) else ():
            if name is not None and isinstance(gradient, torch.Tensor):
                kept = gradient.double() if self._dp > 1 else gradient.clone()
                self._returned[name] = self._returned[name] + kept if name in self._returned else kept

    def after_backward(self, model: nn.Module, step: int) -> None:
        compiled = tuple(f"{clean_fqn(name)}." for name, part in model.named_modules() if is_compiled(part))
        grads = {clean_fqn(name): param.grad for name, param in model.named_parameters() if param.grad is not None}
        gradients: Iterable[_Gradient] = (
            self._gradient(fqn, grad) for fqn, grad in grads.items() if fqn.startswith(compiled)
        )
        scale = 1.0
        if self._clips:
            gradients = list(gradients)
            scale = _common_scale(gradients)
        self.distances += [self._distance(gradient, scale, step) for gradient in gradients]
        self._returned.clear()
        self._forward.clear()

    def _gradient(self, fqn: str, grad: torch.Tensor) -> _Gradient:
        found, axes, returned = local_tensor(grad).double(), _summed_axes(grad), self._returned.get(fqn)
        if returned is None:
            return _Gradient(fqn, axes, found)
        expected = returned.double()
        if isinstance(grad, DTensor) and axes:
            expected = _reduced(grad, expected, axes)
        return _Gradient(fqn, axes, found, expected if found.shape == expected.shape else None)

    def _distance(self, gradient: _Gradient, scale: float, step: int) -> GradientDistance:
        fqn, axes, found, returned = gradient
        if returned is None:
            return GradientDistance(step=step, fqn=fqn, distance=math.nan)
        expected = returned * scale
        # A sum or a mean over data-parallel ranks; TP ranks may each have returned the whole.
        factors = {times * parts for times in {1, self._dp} for parts in {1, self._tp if _TP in axes else 1}}
        distances = [relative_distance(found, expected / factor) for factor in factors]
        nearest = min(distances, key=lambda distance: math.inf if math.isnan(distance) else distance)
        return GradientDistance(step=step, fqn=fqn, distance=nearest, summed_over_tp=_TP in axes)


def _common_scale(gradients: Iterable[_Gradient]) -> float:
    """Return the factor that most gradients show; 1 where none shows one."""
    shares = [
        float((gradient.found * gradient.returned).sum() / gradient.returned.square().sum())
        for gradient in gradients
        if gradient.returned is not None
    ]
    return statistics.median([share for share in shares if math.isfinite(share)] or [1.0])


def _summed_axes(grad: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which what ranks returned is added up: all of FSDP2, TP where its ranks hold the sum alike."""
    if not isinstance(grad, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    pairs = zip(names, grad.placements, strict=True)
    return tuple(name for name, place in pairs if name != _TP or place.is_replicate())


def _reduced(grad: DTensor, returned: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """This rank's shard of the sum of what ranks returned along these axes."""
    mesh = grad.device_mesh
    over = mesh[axes] if len(axes) < mesh.ndim else mesh
    placed: dict[str, Any] = dict(zip(mesh.mesh_dim_names or (), grad.placements, strict=True))
    # Among the shards of tensor parallelism FSDP2 divides those of a rank, as if they were the tensor.
    placements = [Shard(placed[axis].dim) if hasattr(placed[axis], "dim") else placed[axis] for axis in axes]
    summed = DTensor.from_local(returned, over, [Partial()] * len(axes), run_check=False)
    return summed.redistribute(placements=placements).to_local()


def _place(tensor: Any) -> tuple[int, torch.Size] | None:
    """What tells a parameter among the inputs of a graph, which have its storage; None of what is no plain tensor."""
    local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
    if local is None or type(local) not in {torch.Tensor, nn.Parameter} or not local.numel():
        return None
    return local.data_ptr(), local.shape
