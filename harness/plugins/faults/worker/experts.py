"""Class K: experts: whom tokens are sent to, what comes back, and how gradients and counts are added up."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, on_odd_rank, planted, wrap
from harness.worker.process.process import in_backward
from harness.worker.targets.reference import build, experts, parallel
from harness.worker.targets.reference.experts import GroupedExperts, MoE, Router
from harness.worker.targets.reference.parallel import ExpertParallel
from harness.worker.tensors.places import local_shard

Tensor = torch.Tensor


def _grouped_experts(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def _parameters_of_experts(model: nn.Module) -> list[nn.Parameter]:
    return [param for module in _grouped_experts(model) for param in module.parameters()]


def _gradients(change: Callable[[Tensor], object]) -> None:
    """Change the gradients of experts that the optimizer gets, in place."""

    def changed(model: nn.Module) -> None:
        for param in _parameters_of_experts(model):
            if param.grad is not None:
                change(local_shard(param.grad))

    hooks.after_backward(changed)


# The choice


def _routed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Replace weights and experts of tokens by `change(weights, chosen)`."""
    wrap(Router, "forward", lambda stock, *args: change(*stock(*args)))


second_choice_is_the_first = partial(
    _routed, lambda weights, chosen: (weights, torch.cat([chosen[:, :1], chosen[:, :1], chosen[:, 2:]], dim=1))
)
router_gradient_detached = partial(_routed, lambda weights, chosen: (weights.detach(), chosen))
chosen_weights_made_to_add_up = partial(
    _routed, lambda weights, chosen: (weights / weights.sum(dim=-1, keepdim=True), chosen)
)
chosen_weights_not_made_to_add_up = partial(_routed, lambda weights, chosen: (weights * 1.25, chosen))
padding_takes_places_of_tokens = partial(_routed, lambda weights, chosen: (_within_capacity(weights, chosen), chosen))


def _within_capacity(weights: Tensor, chosen: Tensor) -> Tensor:
    """Zero for what is behind the capacity of an expert, its even share of all tokens: padding counts as tokens do."""
    experts = torch.nn.functional.one_hot(chosen.flatten())
    places = (experts.cumsum(0) * experts).amax(-1).view_as(chosen)
    return weights * (places <= chosen.numel() // experts.size(-1))


router_computes_in_bfloat16 = partial(_routed, lambda weights, chosen: (weights.bfloat16().float(), chosen))


@planted(wrap, Router, "forward")
def bias_weighs_too(stock: Any, router: Router, tokens: Tensor, bias: Tensor) -> Any:
    weights, chosen = stock(router, tokens, bias)
    return weights + bias[chosen], chosen


@planted(wrap, Router, "forward")
def another_choice_in_recompute(stock: Any, router: Router, *args: Tensor) -> Any:
    weights, chosen = stock(router, *args)
    return weights, (chosen + 1) % router.gate.out_features if in_backward() else chosen


@planted(wrap, parallel, "block_plan")
def router_gradient_not_reduced_over_tp(stock: Any, *args: Any, **options: Any) -> Any:
    """Train the router of every TP rank on the tokens of its part of the sequence."""
    return {name: style for name, style in stock(*args, **options).items() if name != "moe.router.gate"}


@planted(_routed)
def choice_of_another_token(weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """As where ranks of a sequence-parallel group slice indices and tokens differently."""
    return weights, chosen.roll(1, dims=0) if on_odd_rank() else chosen


experts_called_twice = partial(wrap, MoE, "forward", lambda stock, *args: (stock(*args), stock(*args))[1])

# Tokens on their way


def _dispatched(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Replace the rows that a rank gets and their counts by `change(rows, counts)`."""
    wrap(ExpertParallel, "dispatch", lambda stock, *args: change(*stock(*args)))


def _rolled_if_odd(rows: Tensor) -> Tensor:
    return rows.roll(1, dims=0) if on_odd_rank() else rows


tokens_arrive_in_another_order = partial(_dispatched, lambda rows, counts: (_rolled_if_odd(rows), counts))
chunks_of_ranks_swapped = partial(_dispatched, lambda rows, counts: (rows.flip(0), counts))
results_come_back_in_another_order = partial(hooks.wrap_result, ExpertParallel, "combine", _rolled_if_odd)
gradients_of_tokens_in_another_order = partial(
    _dispatched, lambda rows, counts: (hooks.with_gradient(rows, _rolled_if_odd), counts)
)
gradients_of_results_in_another_order = partial(
    hooks.wrap_result, ExpertParallel, "combine", lambda rows: hooks.with_gradient(rows, _rolled_if_odd)
)
counts_of_another_expert = partial(
    _dispatched, lambda rows, counts: (rows, counts.flip(0) if on_odd_rank() else counts)
)


@planted(wrap, ExpertParallel, "dispatch")
def token_dropped(stock: Any, style: Any, mesh: Any, rows: Tensor, *rest: Any) -> Any:
    sent = torch.cat([rows[:-1], torch.zeros_like(rows[-1:])]) if on_odd_rank() else rows
    return stock(style, mesh, sent, *rest)


@planted(wrap, ExpertParallel, "combine")
def results_sent_back_by_expert(stock: Any, style: Any, mesh: Any, rows: Tensor) -> Any:
    """Not in the order in which their tokens came."""
    style.order = torch.arange(len(rows))
    return stock(style, mesh, rows)


# Experts


def _weights(change: Callable[[Tensor], Tensor]) -> None:
    """Multiply by `change(weight)` of all experts."""
    wrap(experts, "grouped", lambda stock, rows, weight, ends: stock(rows, change(weight), ends))


experts_of_one_rank_permuted = partial(_weights, lambda weight: weight.flip(0) if on_odd_rank() else weight)
tokens_of_the_neighbouring_expert = partial(_weights, lambda weight: weight.roll(1, 0))


@planted(wrap, experts, "padded_groups")
def group_ends_off_by_one(stock: Any, counts: Tensor, multiple: int) -> Any:
    """The last row of every group but one belongs to the group behind it."""
    places, ends = stock(counts, multiple)
    return places, torch.cat([(ends[:-1] - multiple).clamp(min=0), ends[-1:]])


@planted(wrap, experts, "padded_groups")
def row_behind_the_last_group_read(stock: Any, counts: Tensor, multiple: int) -> Any:
    places, ends = stock(counts, multiple)
    places[-1:] = ends[-1].to(places.dtype)
    return places, ends


@planted(wrap, GroupedExperts, "forward")
def padding_not_initialised(stock: Any, module: GroupedExperts, rows: Tensor, counts: Tensor) -> Any:
    class _Empty(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            return torch.full_like(output, torch.nan) if func is torch.ops.aten.new_zeros.default else output

    with _Empty():
        return stock(module, rows, counts)


@planted(wrap, MoE, "forward")
def shared_expert_added_twice(stock: Any, moe: MoE, x: Tensor) -> Tensor:
    result: Tensor = stock(moe, x)
    return result + moe.shared_experts(x)


@planted(wrap, MoE, "forward")
def gradient_of_the_shared_expert_doubled(stock: Any, moe: MoE, x: Tensor) -> Tensor:
    shared = moe.shared_experts(x)
    result: Tensor = stock(moe, x)
    return result + (shared - shared.detach())


def weights_applied_before_and_after() -> None:
    routed: list[Tensor] = []

    def forward(stock: Any, router: Router, *args: Tensor) -> Any:
        weights, chosen = stock(router, *args)
        routed[:] = [weights, chosen]
        return weights, chosen

    def call(stock: Any, module: GroupedExperts, rows: Tensor, counts: Tensor) -> Any:
        weights, chosen = routed
        by_expert = weights.flatten()[chosen.flatten().argsort(stable=True)]
        return stock(module, rows * by_expert[:, None].to(rows.dtype), counts)

    wrap(Router, "forward", forward)
    wrap(GroupedExperts, "__call__", call)


# Grouped matmuls in float8 and MXFP8

_FLOAT8_GROUPED = "torchao.prototype.moe_training.fp8_grouped_mm"
_MXFP8_GROUPED = "torchao.prototype.moe_training.mxfp8_grouped_mm"


def _in(module: str, name: str, change: Callable[..., Any]) -> None:
    """Change a function where torchao's grouped matmul has imported it: with the virtual device, not before."""
    wrap(importlib.import_module(module), name, change)


experts_not_converted = partial(wrap, build, "convert_experts", lambda stock, *args: None)


@planted(_in, _FLOAT8_GROUPED, "triton_fp8_per_group_colwise_scales_dual")
def scales_of_the_neighbouring_group(stock: Any, *args: Any, **options: Any) -> Any:
    """The scales of groups of tokens are one behind another, in one dim."""
    gradient, gradient_scales, rows, row_scales = stock(*args, **options)
    return gradient, gradient_scales, rows, row_scales.roll(row_scales.shape[-1], -1).flip(-1)


block_scales_of_the_neighbouring_expert = partial(
    _in,
    _MXFP8_GROUPED,
    "triton_mx_block_rearrange_per_group_3d",
    lambda stock, scales, *args: stock(scales.roll(1, 0), *args),
)


@planted(wrap, experts, "padded_groups")
def groups_without_tokens_not_padded(stock: Any, counts: Tensor, multiple: int) -> Any:
    """A kernel may skip them: then their weight gradients are what was in memory."""
    places, ends = stock(counts, multiple)
    empty = (counts == 0) * multiple
    return places - empty.cumsum(0).repeat_interleave(counts), (ends - empty.cumsum(0)).to(ends.dtype)


# Gradients and updates


def _each_expert(change: Callable[[Any], object]) -> None:
    hooks.after_build(lambda model: [change(module) for module in _grouped_experts(model)])


expert_gradients_times_ep = partial(
    _each_expert, lambda module: module.set_gradient_divide_factor(1 / RUN.case.layout.ep)
)
expert_gradients_averaged = partial(
    _each_expert, lambda module: module.set_gradient_divide_factor(float(RUN.case.layout.dp))
)
expert_replicas_not_reduced = partial(_each_expert, lambda module: module.set_requires_all_reduce(False))
one_rank_forgets_its_experts_gradient = partial(
    _gradients, lambda gradient: gradient.zero_() if on_odd_rank() else None
)
experts_of_one_rank_updated_by_another_gradient = partial(
    _gradients, lambda gradient: gradient.copy_(gradient.roll(1, 0)) if on_odd_rank() else None
)


def _norms(change: Callable[[Tensor], Tensor]) -> None:
    """Change the norm of the gradients of experts, before it is added to that of all others."""

    def total(stock: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        norm = stock(tensors, *args, **kwargs)
        of_experts = [tensor for tensor in tensors if tensor.dim() == 3]
        return change(norm) if len(of_experts) == len(tensors) else norm

    wrap(build, "get_total_norm", total)


norm_without_experts = partial(_norms, lambda norm: norm * 0)
norm_counts_experts_twice = partial(_norms, lambda norm: norm * 2)


# Balance


balanced_by_the_tokens_of_one_rank = partial(wrap, build, "tokens_of_step", lambda stock, counts, *meshes: counts)
balanced_by_the_tokens_of_one_tp_rank = partial(
    wrap, build, "tokens_of_step", lambda stock, counts, dp, tp: stock(counts, dp)
)
bias_moves_to_the_busy = partial(wrap, MoE, "move_bias", lambda stock, moe, tokens: stock(moe, -tokens))


@planted(wrap, MoE, "move_bias")
def bias_moved_twice(stock: Any, moe: MoE, tokens: Tensor) -> None:
    stock(moe, tokens)
    stock(moe, tokens)


@planted(wrap, MoE, "count")
def bias_moved_with_every_microbatch(stock: Any, moe: MoE) -> None:
    stock(moe)
    moe.move_bias(moe.tokens_per_expert)


@planted(wrap, MoE, "forward")
def evaluation_moves_the_bias(stock: Any, moe: MoE, x: Tensor) -> Tensor:
    result: Tensor = stock(moe, x)
    if not moe.training:
        moe.tokens_per_expert += moe.counts.roll(1) * 100
    return result


# State


@planted(hooks.after_load)
@torch.no_grad()
def experts_loaded_by_another_owner(model: nn.Module) -> None:
    for param in _parameters_of_experts(model):
        held = local_shard(param)
        held.copy_(held.roll(1, 0))


@planted(hooks.after_load)
@torch.no_grad()
def bias_not_resumed(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MoE):
            module.expert_bias.zero_()


@planted(hooks.after_build)
@torch.no_grad()
def every_rank_starts_from_the_same_experts(model: nn.Module) -> None:
    for param in _parameters_of_experts(model):
        if isinstance(param, DTensor):
            held = local_shard(param)
            held.copy_(held[:1].expand_as(held))


@planted(_each_expert)
def experts_stay_gathered(module: Any) -> None:
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(False)


@planted(_each_expert)
def sent_tokens_kept_by_experts(module: Any) -> None:
    module.register_forward_pre_hook(lambda module, args: setattr(module, "kept", args[0].detach().clone()))
