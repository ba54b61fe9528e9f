"""The backend of `compile = "graph"`: inductor's graphs, executed eagerly.

AOTAutograd, the min-cut partitioner and all post-grad passes of inductor, including async TP, run as in a real compile.
Then the graph is executed one ATen operator at a time. Without code generation, a case takes seconds, and operators are
neither decomposed nor fused, so the results are bit-equal to eager: any difference comes from a graph pass.

`install` works around a CPU-only limitation of torch 2.13: saved RNG states of compiled checkpointed blocks. On a CPU,
a graph that recomputes an operator which may draw random numbers saves the RNG state as an extra output of the forward
graph (on a GPU it is an input). That output follows the device mesh of a DTensor, where AOTAutograd expects tensors,
and the run fails: "expected all tensors_saved_with_vc_check to be Tensors ... DeviceMesh". Attention counts as such an
operator even without dropout. Graphs that draw no random numbers need no RNG state, so none is saved for them, and
only for them; the trace lists the workaround.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners as stock_partitioners
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V

from harness.worker.process.process import PROCESS

# Called with (node, arguments, result) after every operator of a graph that was compiled while there were observers.
# Probes append themselves; they must not write to tensors.
observers: list[Callable[[torch.fx.Node, tuple[Any, ...], Any], None]] = []

# Called with every graph as it will be executed, after all passes: a forward graph, then its backward graph.
graph_observers: list[Callable[[torch.fx.Graph], None]] = []


def graph_backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a backend for `torch.compile`. Returns a callable with the signature of `module`."""
    compiler = aot_autograd(fw_compiler=_compile, partition_fn=_partition)
    compiled: Callable[..., Any] = compiler(module, inputs)
    return compiled


def _partition(module: torch.fx.GraphModule, inputs: Any, **given: Any) -> Any:
    """Inductor's partitioner, by the name in this module: what probes and faults put in its place is used too."""
    return min_cut_rematerialization_partition(module, inputs, **given)


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what inductor (`compile_fx`) does with a partitioned graph, up to but without its lowering."""
    post_grad.view_to_reshape(module)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.reshape.default  # as inductor decomposes it; the fusion pass matches reshape only
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, list(inputs))
    with V.set_fake_mode(fake_mode):
        post_grad.post_grad_passes(module, is_inference=False)
    module.graph.lint()
    module.recompile()
    for observe in graph_observers:
        observe(module.graph)
    boxed: Callable[..., Any] = _observed(module) if observers else make_boxed_func(module.forward)
    return boxed


def _observed(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Run the same operators in the same order, and call the observers after each."""

    def run(inputs: list[Any]) -> Any:
        return _ObservedInterpreter(module).boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _ObservedInterpreter(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        for observe in observers:
            observe(n, args, result)
        return result


WORKAROUND = "no_rng_state_for_attention_without_dropout"

_DROPOUT_ARGUMENT = "dropout_p"


def install() -> None:
    partitioners: Any = stock_partitioners
    partitioners.has_recomputable_rng_ops = _only_if_any_op_draws(partitioners.has_recomputable_rng_ops)


def _only_if_any_op_draws(stock: Callable[[torch.fx.GraphModule], bool]) -> Callable[[torch.fx.GraphModule], bool]:
    def has_recomputable_rng_ops(module: torch.fx.GraphModule) -> bool:
        if not stock(module):
            return False
        if any(_draws(node) for node in module.graph.nodes):
            return True
        if WORKAROUND not in PROCESS.workarounds:
            PROCESS.workarounds.append(WORKAROUND)
        return False

    return has_recomputable_rng_ops


def _draws(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == _DROPOUT_ARGUMENT:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
