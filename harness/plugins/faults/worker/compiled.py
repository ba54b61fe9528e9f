"""Class H: compiled blocks and async TP. Most of these bugs were released once: see the links in `faults.toml`."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._higher_order_ops.wrap
import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem
from torch._functorch.partitioners import must_recompute
from torch._inductor import compile_fx
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import CheckpointPolicy

from harness.plugins.faults.worker import conversion, hooks, training
from harness.plugins.faults.worker.amax import amax_not_reduced_over_tp
from harness.plugins.faults.worker.hooks import RUN, local, on_last_rank, planted, wrap, wrap_everywhere
from harness.worker.dispatch_hooks.collectives import resolve_group
from harness.worker.virtual import graph_backend

_aten = torch.ops.aten

# The fusion pass is on, but the TP group has no symmetric memory. Until torch 2.14 because nobody enabled it for the
# group; in 2.15 where no allocator is registered for the device.
symmetric_memory_not_enabled = partial(wrap, symm_mem, "is_symm_mem_enabled_for_group", lambda stock, group_name: False)
fusion_pass_off = partial(hooks.after_build, lambda model: setattr(torch._inductor.config, "_micro_pipeline_tp", False))


scatters_not_recognized = partial(
    wrap,
    micro_pipeline_tp,
    "_find_producer_matmul",
    lambda stock, node: None if node.target is _aten.reshape.default else stock(node),
)


def _after_match(change: Callable[[Any], None]) -> None:
    """Call `change(matmul)` on every scaled matmul that the pass has matched."""

    def from_match(stock: Any, kind: Any, match: list[torch.fx.Node]) -> Any:
        matmul = stock(kind, match)
        change(matmul)
        return matmul

    wrap(micro_pipeline_tp._ScaledMatmul, "from_match", from_match)


@planted(_after_match)
def operand_taken_before_its_reshape(matmul: Any) -> None:
    if matmul.pre_mm_reshape is not None:
        matmul.A_node = matmul.pre_mm_reshape.args[0]


output_shape_forgotten = partial(_after_match, lambda matmul: setattr(matmul, "post_mm_reshape", None))


@planted(wrap, symm_mem, "_fused_matmul_reduce_scatter_impl")
def scattered_dim_not_moved_back(stock: Any, scatter_dim: int, **rest: Any) -> torch.Tensor:
    result = stock(scatter_dim=scatter_dim, **rest)
    return result.movedim(scatter_dim, 0).reshape(result.shape)


@planted(wrap, micro_pipeline_tp, "_insert_fused_matmul_reduce_scatter")
def scatter_dim_of_the_flat_operand(stock: Any, graph: Any, matmul: Any, op: str, dim: int, *rest: Any) -> Any:
    group, flat_dim, shape = rest
    return stock(graph, matmul, op, flat_dim, group, flat_dim, shape)


scatter_averages = partial(
    wrap,
    micro_pipeline_tp,
    "_insert_fused_matmul_reduce_scatter",
    lambda stock, graph, matmul, op, *rest: stock(graph, matmul, "avg", *rest),
)


@planted(wrap, symm_mem, "_fused_scaled_matmul_reduce_scatter_impl")
def row_scales_of_the_first_chunk(stock: Any, **given: Any) -> Any:
    scale = given["A_scale"]
    if scale.numel() > 1:
        ranks = resolve_group(given["group_name"]).size()
        first = scale.flatten(0, -2).chunk(ranks)[0]
        given["A_scale"] = first.repeat(ranks, 1).view(scale.shape)
    return stock(**given)


@planted(wrap, symm_mem, "_pipelined_multi_all_gather_and_consume")
def gathered_chunks_swapped(stock: Any, shard: Any, consume: Any, output: Any, group_name: str, *needed: bool) -> None:
    ranks = resolve_group(group_name).size()
    stock(shard, lambda chunk, rank: consume(chunk, (rank + 1) % ranks), output, group_name, *needed)


@planted(wrap, symm_mem, "_pipelined_produce_and_all2all")
def produced_chunks_swapped(stock: Any, produce: Any, output: Any, group_name: str, *dim: int) -> None:
    ranks = resolve_group(group_name).size()
    stock(lambda rank, chunk: produce((rank + 1) % ranks, chunk), output, group_name, *dim)


blocks_not_compiled = partial(
    wrap_everywhere,
    torch,
    "compile",
    lambda stock, block=None, **_: (lambda module: module) if block is None else block,
)


compiled_gradients_in_e4m3 = conversion.gradient_cast_to_e4m3
compiled_amax_not_reduced_over_tp = amax_not_reduced_over_tp
compiled_weights_nan = training.nan_gradient_on_one_rank


def _after_passes(change: Callable[[torch.fx.Graph], int]) -> None:
    """Call `change(graph)` after the passes over every graph. It returns how many nodes it changed, which are some."""

    def post_grad_passes(stock: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        stock(module, *args, **kwargs)
        if not change(module.graph):
            raise RuntimeError("the graph has nothing that this fault changes")

    wrap_everywhere(post_grad, "post_grad_passes", post_grad_passes)


def _clamps(graph: torch.fx.Graph) -> list[Any]:
    """The clamps of all casts to float8, in inductor to the minimum: of the product of a tensor and its scale."""
    targets = (_aten.clamp.default, _aten.clamp_min.default)
    clamps = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    return [clamp for clamp in clamps if clamp.args[0].target is _aten.mul.Tensor]


def _insert_behind(node: torch.fx.Node, function: Callable[..., torch.Tensor], argument: Any) -> None:
    """Let everything that reads a node read `function(node, argument)`."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(function, (node, argument))
    made.meta["val"] = node.meta.get("val")
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


@planted(_after_passes)
def compiled_cast_clamps_early(graph: torch.fx.Graph) -> int:
    e4m3, e5m2, wrong = (
        torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
    )
    clamps = _clamps(graph)
    for clamp in clamps:
        product, minimum, *_ = clamp.args
        assert -minimum in (e4m3, e5m2), f"a cast clamps at {minimum}"
        if -minimum != e4m3:
            continue  # in every forward
        clamp.args = (product, -wrong, wrong)[: len(clamp.args)]
        for upper in list(clamp.users) if len(clamp.args) == 2 else ():
            upper.args = (clamp, wrong)
    return len(clamps)


@planted(_after_passes)
def compiled_clamp_dropped(graph: torch.fx.Graph) -> int:
    clamps = _clamps(graph)[-1:]
    for clamp in clamps:
        clamp.replace_all_uses_with(clamp.args[0])
    return len(clamps)


@planted(_after_passes)
def compiled_scale_negative(graph: torch.fx.Graph) -> int:
    scales = [clamp.args[0].args[1] for clamp in _clamps(graph)[-1:]]
    for scale in scales:
        _insert_behind(scale, torch.mul, -1.0)
    return len(scales)


def compiled_scale_stale() -> None:
    places = itertools.count()
    first: dict[tuple[int, int], torch.Tensor] = {}
    calls: Counter[tuple[int, int]] = Counter()  # blocks may share a graph

    @torch.library.custom_op("fp8_harness::first_scale", mutates_args=())  # what generated code can call too
    def first_scale(scale: torch.Tensor, place: int) -> torch.Tensor:
        calls[RUN.step, place] += 1
        return first.setdefault((place, calls[RUN.step, place]), scale.clone()).clone()

    first_scale.register_fake(lambda scale, place: torch.empty_like(scale))

    def change(graph: torch.fx.Graph) -> int:
        scales = dict.fromkeys(clamp.args[0].args[1] for clamp in _clamps(graph))
        for scale in scales:
            _insert_behind(scale, torch.ops.fp8_harness.first_scale.default, next(places))
        return len(scales)

    _after_passes(change)


@planted(_after_passes)
def compiled_amax_sent_twice(graph: torch.fx.Graph) -> int:
    all_reduce, wait = torch.ops._c10d_functional.all_reduce_.default, torch.ops._c10d_functional.wait_tensor.default

    def twice(amax: torch.Tensor) -> torch.Tensor:
        return amax.reshape(-1).repeat(2)

    def once(reduced: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return reduced[: like.numel()].reshape(like.shape)

    reductions = [node for node in graph.find_nodes(op="call_function", target=all_reduce) if node.args[1] == "max"]
    for reduction in reductions:
        amax = reduction.args[0]
        with graph.inserting_before(reduction):
            reduction.update_arg(0, graph.call_function(twice, (amax,)))
        waited = next(user for user in reduction.users if user.target is wait)
        _insert_behind(waited, once, amax)
    return len(reductions)


compiled_checkpointing_lost = partial(
    wrap, torch._higher_order_ops.wrap, "_always_prefer_recompute", lambda *args, **kwargs: CheckpointPolicy.PREFER_SAVE
)


def _around_partition(change: Callable[..., Any]) -> None:
    for owner in (graph_backend, compile_fx):
        wrap(owner, "min_cut_rematerialization_partition", change)


@planted(_around_partition)
def compiled_matmul_outputs_kept(stock: Any, module: torch.fx.GraphModule, inputs: Any, **given: Any) -> Any:
    for node in module.graph.nodes:
        if node.target in {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default} and must_recompute(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return stock(module, inputs, **given)


def _in_repeated(change: Callable[[torch.fx.Graph, set[str]], int]) -> None:
    """Call `change(graph, repeated)` after the passes over a backward graph with the names that forward has too."""
    forward: list[set[str]] = []

    def in_turn(graph: torch.fx.Graph) -> int:
        names = {node.name for node in graph.nodes if node.op == "call_function"}
        if not forward:
            forward.append(names)
            return 1
        return change(graph, names & forward.pop())

    _after_passes(in_turn)


@planted(_in_repeated)
def recomputed_cast_by_another_scale(graph: torch.fx.Graph, repeated: set[str]) -> int:
    products = [clamp.args[0] for clamp in _clamps(graph) if clamp.args[0].name in repeated]
    if not products:
        return 0
    last = products[-1]
    shape = last.meta["val"].shape
    others = [product for product in products if product.meta["val"].shape != shape]  # weights of one shape start alike
    for other in others[-1:]:
        last.args = (last.args[0], other.args[1])
    return len(others)


@planted(_in_repeated)
def recomputed_norm_without_epsilon(graph: torch.fx.Graph, repeated: set[str]) -> int:
    sums = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Scalar)
    again = [node for node in sums if node.name in repeated]
    for node in again:
        node.args = (node.args[0], 0.0)
    return len(again)


@planted(_after_passes)
def compiled_amax_of_half_the_rows(graph: torch.fx.Graph) -> int:
    maxima = [node for node in graph.find_nodes(op="call_function", target=_aten.max.default) if len(node.args) == 1]
    for amax in maxima:
        magnitudes: Any = amax.args[0]
        rows = magnitudes.meta["val"].shape[0] // 2
        with graph.inserting_before(amax):
            half = graph.call_function(_aten.slice.Tensor, (magnitudes, 0, 0, rows))
        half.meta["val"] = magnitudes.meta["val"][:rows]
        amax.args = (half,)
    return len(maxima)


@planted(_after_passes)
def compiled_matmul_scaled_as_another(graph: torch.fx.Graph) -> int:
    matmuls: list[Any] = graph.find_nodes(op="call_function", target=_aten._scaled_mm.default)
    a, b, _, *rest = matmuls[-1].args
    matmuls[-1].args = (a, b, matmuls[0].args[2], *rest)
    return len(matmuls)


@planted(hooks.after_backward)
def compiled_gradients_off_on_last_rank(model: Any) -> None:
    for block in hooks.blocks(model) if on_last_rank() else ():
        for param in block.parameters():
            if param.dim() > 1 and param.grad is not None:
                local(param.grad).mul_(1.03)


generated_gradients_off = compiled_gradients_off_on_last_rank


@planted(wrap, GraphLowering, "call_function")
def generated_mean_leaves_out_the_end(stock: Any, lowering: Any, target: Any, args: Any, kwargs: Any) -> Any:
    if target is not _aten.mean.dim:
        return stock(lowering, target, args, kwargs)
    values, dims, *rest = args
    size = int(values.get_size()[-1])
    kept = size - size // 16
    part = stock(lowering, _aten.slice.Tensor, (values, -1, 0, kept), {})
    mean = stock(lowering, target, (part, dims, *rest), kwargs)
    return stock(lowering, _aten.mul.Tensor, (mean, kept / size), {})
