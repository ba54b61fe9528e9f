"""The backend of `compile = "graph"`: inductor's graphs, executed eagerly.

AOTAutograd, the min-cut partitioner and all of inductor's post-grad passes run as in a real compile, that of async TP
among them; then the graph is called as it stands, one ATen operator after the other. No code is generated, so a case
costs seconds, and operators are neither decomposed nor fused by a code generator, so the bits are those of eager code.
What differs from eager was done by a graph pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V

# Called with (node, its arguments, its result) for every operator that a graph executes, if there is any when the graph
# is compiled. Probes subscribe; they must not write.
watchers: list[Callable[[torch.fx.Node, tuple[Any, ...], Any], None]] = []


def graph_backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend for `torch.compile`. Returns a callable with the signature of `module`."""
    compiler = aot_autograd(fw_compiler=_compile, partition_fn=min_cut_rematerialization_partition)
    compiled: Callable[..., Any] = compiler(module, inputs)
    return compiled


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's way from a partitioned graph to its lowering (`compile_fx`), and no further."""
    post_grad.view_to_reshape(module)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.reshape.default  # inductor decomposes it so; the fusion pass knows only reshape
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, list(inputs))
    with V.set_fake_mode(fake_mode):
        post_grad.post_grad_passes(module, is_inference=False)
    module.graph.lint()
    module.recompile()
    boxed: Callable[..., Any] = _watched(module) if watchers else make_boxed_func(module.forward)
    return boxed


def _watched(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """The same operators in the same order, every one shown to the watchers."""

    def run(inputs: list[Any]) -> Any:
        return _Watched(module).boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Watched(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        for watch in watchers:
            watch(n, args, result)
        return result
