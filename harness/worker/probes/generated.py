"""Repeats every graph that inductor has generated code for, operator by operator, and holds the code against it.

Generated code casts inside of its kernels, where no probe sees it. But every graph is known as it was lowered, and so
are the inputs of every call, what it multiplied (`_scaled_mm` stays a call of the operator) and what it returned. The
repetition executes the graph on the same inputs, so that its casts are recorded as those of the graph backend; the
operands of the code's matmuls and its results are compared with those of the repetition, which goes on with the
results that the code's matmuls had.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch._inductor import compile_fx
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._pytree import tree_map_only

from harness.trace.graphs import GeneratedResult, GeneratedTensor
from harness.worker.dispatch_hooks import fused, matmuls
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.graph_casts import GradientWatcher, GraphCastWatcher, fqn_of, phase_now
from harness.worker.probes.probe import Probe
from harness.worker.tensors.names import dtype_name
from harness.worker.tensors.reduction import relative_distance
from harness.worker.virtual.collectives import FLOAT8

_SCALED_MM = torch.ops.aten._scaled_mm.default
_FUSED = {getattr(torch.ops.symm_mem, name).default: name for name in fused.OPERATORS}
_SUM = torch.ops.aten.sum.dim_IntList
_SAME_NUMBERS = {
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.prims.convert_element_type.default,
}
_MODULE = "fp8_harness_module"  # the attribute of compiled code that has the graph which was lowered


class _Called(NamedTuple):
    """One scaled matmul or fused operator that generated code called. `scales`: of its operands, where compared."""

    operator: str
    operands: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    result: Any

    def fits(self, operator: str, operands: tuple[torch.Tensor, ...]) -> bool:
        return self.operator == operator and [(operand.shape, operand.dtype) for operand in self.operands] == [
            (operand.shape, operand.dtype) for operand in operands
        ]


class GeneratedCodeWatcher:
    """`results` grows with every call of compiled code, and `casts` sees the operators of its repetition."""

    def __init__(
        self, casts: GraphCastWatcher, gradients: GradientWatcher, lowered: Callable[[torch.fx.Graph], None]
    ) -> None:
        """`lowered` is called with every graph as code was generated for it."""
        self.results: list[GeneratedResult] = []
        self.emulates_roundings = False
        self.casts, self._gradients, self._lowered = casts, gradients, lowered
        self._step, self._order = 0, 0
        self._called: list[_Called] | None = None  # by the code that is running; None: none is

    def install(self, probe: Probe) -> None:
        probe.replace(
            compile_fx._InProcessFxCompile,
            "codegen_and_compile",
            self._keep_graph(compile_fx._InProcessFxCompile.codegen_and_compile),
        )
        probe.replace(CompiledFxGraph, "__call__", self._repeat_calls(CompiledFxGraph.__call__))
        probe.observe(matmuls.scaled_result_observers, self._on_matmul)
        probe.observe(fused.observers, self._on_fused)

    def begin_step(self, step: int) -> None:
        self._step, self._order = step, 0

    def _keep_graph(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def codegen_and_compile(compiler: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.emulates_roundings = torch._inductor.config.emulate_precision_casts
            compiled = stock(compiler, module, *args, **kwargs)
            setattr(compiled, _MODULE, module)
            self._lowered(module.graph)
            return compiled

        return codegen_and_compile

    def _repeat_calls(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(compiled: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
            module = getattr(compiled, _MODULE, None)
            if module is None:
                return stock(compiled, inputs)
            with torch.no_grad():
                given = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in inputs]
            self._called = []
            self._gradients.before_call(inputs)
            outputs = stock(compiled, inputs)
            self._gradients.after_call(outputs)
            called, self._called = self._called, None
            with torch.no_grad(), unobserved():
                self._compare(module, given, called, outputs)
            return outputs

        return call

    def _on_matmul(self, *tensors: torch.Tensor) -> None:
        if self._called is not None:
            a, b, scale_a, scale_b, result = (tensor.clone() for tensor in tensors)
            self._called.append(_Called(_SCALED_MM.name(), (a, b), (scale_a, scale_b), result))

    def _on_fused(self, operator: str, given: dict[str, Any], result: Any) -> None:
        if self._called is not None:
            self._called.append(
                _Called(operator, (given["A"].clone(),), (), tree_map_only(torch.Tensor, torch.clone, result))
            )

    def _compare(
        self, module: torch.fx.GraphModule, given: list[Any], called: list[_Called], outputs: Sequence[Any]
    ) -> None:
        repetition = _Repetition(module, called, self)
        repeated = repetition.boxed_run(given)
        returned: Any = module.graph.output_node().args[0]
        for node, mine, theirs in zip(returned, repeated, outputs, strict=True):
            if isinstance(theirs, torch.Tensor) and theirs.is_floating_point() and theirs.dtype not in FLOAT8:
                self.note(node, "result", theirs, mine, cancelled=repetition.cancelled(node))

    def note(
        self,
        node: torch.fx.Node,
        tensor: GeneratedTensor,
        found: torch.Tensor | None,
        expected: torch.Tensor,
        dtype: torch.dtype | None = None,
        cancelled: float = 1.0,
    ) -> None:
        """Compare a tensor of the code with the one of the repetition; `dtype`: in which the code has it."""
        self._order += 1
        self.results.append(
            GeneratedResult(
                step=self._step,
                order=self._order,
                phase=phase_now(),
                fqn=fqn_of(node),
                tensor=tensor,
                dtype=dtype_name(dtype or expected.dtype),
                cancelled=cancelled,
                **distances(found, expected)._asdict(),
            )
        )


class _Repetition(torch.fx.Interpreter):
    """Executes a graph, its matmuls with the results that the code's had."""

    def __init__(self, module: torch.fx.GraphModule, called: list[_Called], watcher: GeneratedCodeWatcher) -> None:
        super().__init__(module)
        self._called = called
        self._watcher = watcher
        self._cancelled: dict[torch.fx.Node, float] = {}  # of every sum

    def cancelled(self, node: torch.fx.Node) -> float:
        """How much larger the norm of the terms is than that of their sum: of the sum that a node has. At least 1."""
        while node.target in _SAME_NUMBERS:
            (node,) = node.all_input_nodes
        return max(1.0, self._cancelled.get(node, 1.0))

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is _SCALED_MM:
            result: Any = self._matmul(n, args, kwargs)
        elif n.target in _FUSED:
            result = self._fused(n, args, kwargs)
        else:
            result = getattr(self, n.op)(n.target, args, kwargs)
            if n.target is _SUM:
                self._cancelled[n] = _norm(args[0]) / _norm(result)
        self._watcher.casts(n, args, result)
        return result

    def _matmul(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        a, b, scale_a, scale_b = args[:4]
        call = self._take(_SCALED_MM.name(), a, b)
        if call is None:
            self._watcher.note(node, "a", None, a)
            return _SCALED_MM(*args, **kwargs)
        (found_a, found_b), (found_scale_a, found_scale_b) = call.operands, call.scales
        self._watcher.casts.alias(found_a, a)
        self._watcher.casts.alias(found_b, b)
        self._watcher.note(node, "scale of a", found_scale_a, scale_a)
        self._watcher.note(node, "scale of b", found_scale_b, scale_b)
        moved = _moved_rows(found_a, a) if (scale_a == 1).all() else torch.ones((), device=a.device)
        self._watcher.note(node, "a", found_a.float() * found_scale_a * moved, a.float() * scale_a, a.dtype)
        self._watcher.note(node, "b", found_b.float() * found_scale_b, b.float() * scale_b, b.dtype)
        return (call.result * moved).to(call.result.dtype)

    def _fused(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(node.target, torch._ops.OpOverload)
        a = fused.naming(node.target)(args, kwargs)["A"]
        call = self._take(_FUSED[node.target], a)
        self._watcher.note(node, "a", call and call.operands[0], a)
        return call.result if call else node.target(*args, **kwargs)

    def _take(self, operator: str, *operands: torch.Tensor) -> _Called | None:
        """Return the call with these operands: of calls with such operands, the one with most equal bytes."""
        fitting = [call for call in self._called if call.fits(operator, operands)]
        if not fitting:
            return None
        closest = max(fitting, key=lambda call: math.prod(map(_equal_bytes, call.operands, operands)))
        self._called = [call for call in self._called if call is not closest]
        return closest


def _moved_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the power of two by which the scale of each row differs, where torchao multiplies without scales.

    If the matmul is not fast, torchao applies row scales after it (0.17, `addmm_float8_unwrapped`). A row that the code
    scales differently is exactly that power of two times the graph's row, and so is its product, to which the graph
    then applies its own scale.
    """
    found, expected = found.float(), expected.float()
    along = (found * expected).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True)
    return torch.where(along > 0, along.clamp(0.5, 2.0).log2().round().exp2(), 1.0)


def _equal_bytes(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.dtype in FLOAT8:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    return 1 + float((found == expected).sum())


def _norm(tensor: torch.Tensor) -> float:
    return max(tensor.double().norm().item(), torch.finfo(torch.float64).tiny)


class Distances(NamedTuple):
    """Relative to the norm of the tensor; of the farthest row, to that of a mean row if the row is smaller."""

    distance: float
    farthest_row: float


def distances(found: torch.Tensor | None, expected: torch.Tensor) -> Distances:
    """NaN where there is nothing to compare."""
    if found is None or found.shape != expected.shape:
        return Distances(math.nan, math.nan)
    found, expected = (
        tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).double() for tensor in (found, expected)
    )
    distance, norms = relative_distance(found, expected), expected.norm(dim=-1)
    if distance == 0 or not math.isfinite(distance):
        return Distances(distance, distance)
    typical = norms.square().mean().sqrt().item()
    return Distances(distance, ((found - expected).norm(dim=-1) / norms.clamp(min=typical)).max().item())
