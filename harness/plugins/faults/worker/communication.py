"""Class D: communication, DTensor and FSDP plumbing."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchao.float8 import float8_linear, float8_ops, fsdp_utils
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, on_last_rank, on_odd_rank, planted, wrap, wrap_everywhere

fp8_all_gather_subclass_dropped = fsdp_utils._ops_to_preserve_subclass.clear


def fp8_tp_styles_lost() -> None:
    for style in (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput):
        for method in ("_prepare_input_fn", "_prepare_output_fn", "_prepare_input_arg", "_apply"):
            if method in vars(style):
                delattr(style, method)  # leaves that of the plain style


@planted(hooks.around_evaluation)
def weights_left_gathered_by_evaluation(stock: Callable[[], Any], model: nn.Module) -> Any:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    freeing = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    loss = stock()
    for group, info in zip(groups, freeing, strict=True):
        group.post_forward_mesh_info = info
    return loss


@planted(hooks.after_all_gather)
def gathered_shards_swapped(output: torch.Tensor, group: dist.ProcessGroup) -> None:
    shards = output.view(group.size(), -1)
    shards.copy_(shards.roll(1, 0))


@planted(wrap, Shard, "_to_replicate_tensor")
def sequence_shards_swapped(stock: Any, self: Any, local: Any, mesh: Any, mesh_dim: int, shape: Any) -> torch.Tensor:
    full = stock(self, local, mesh, mesh_dim, shape)
    return full.roll(full.size(self.dim) // mesh.size(mesh_dim), self.dim)


def _partial_activations(reduced: Callable[..., torch.Tensor], scattered: Callable[..., torch.Tensor]) -> None:
    """Replace the sum of partial activations: `reduced(sum, tensor, size)`, and `scattered(sum, tensor, size, chunk)`.

    `chunk` takes the part of a tensor that this rank keeps.
    """

    def in_all_reduce(stock: Any, self: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> torch.Tensor:
        total = partial(stock, self, mesh=mesh, mesh_dim=mesh_dim)
        is_activation = self.reduce_op == "sum" and tensor.dim() > 1
        return reduced(total, tensor, mesh.size(mesh_dim)) if is_activation else total(tensor)

    def in_reduce_scatter(
        stock: Any, self: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard: Any
    ) -> torch.Tensor:
        total = partial(stock, self, mesh=mesh, mesh_dim=mesh_dim, shard_spec=shard)
        if self.reduce_op != "sum":
            return total(tensor)
        size, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        return scattered(total, tensor, size, lambda whole: whole.chunk(size, shard.dim)[rank])

    wrap(Partial, "_reduce_value", in_all_reduce)
    wrap(Partial, "_reduce_shard_value", in_reduce_scatter)


@planted(_partial_activations, lambda total, tensor, size: tensor)
def partial_output_not_reduced(total: Any, tensor: torch.Tensor, size: int, chunk: Any) -> torch.Tensor:
    """Use the partial output of a row-parallel linear without reducing it over the other ranks."""
    mine = torch.zeros_like(tensor)
    chunk(mine).copy_(chunk(tensor))
    return total(mine)


partial_output_averaged = partial(
    _partial_activations,
    lambda total, tensor, size: total(tensor) / size,
    lambda total, tensor, size, chunk: total(tensor) / size,
)


def last_bit_of_partials_lost() -> None:
    def cut(part: torch.Tensor) -> torch.Tensor:
        return (part.view(torch.int16) & ~1).view(part.dtype) if part.dtype == torch.bfloat16 else part

    _partial_activations(
        lambda total, tensor, size: total(cut(tensor)), lambda total, tensor, size, chunk: total(cut(tensor))
    )


@planted(hooks.after_backward)
def norm_gradients_not_reduced(model: nn.Module) -> None:
    for param in model.parameters():
        grad = param.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            param.grad = DTensor.from_local(grad._local_tensor, grad.device_mesh, placements, run_check=False)


def _before_reduction(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every gradient that FSDP2 reduces by `change(grad)`."""

    def foreach_reduce(stock: Any, params: Any, grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        grads[:] = map(change, grads)
        return stock(params, grads, *args, **kwargs)

    wrap(_fsdp_param_group, "foreach_reduce", foreach_reduce)


gradients_divided_by_world = partial(_before_reduction, lambda grad: grad / RUN.case.layout.dp)


def _all_reduce_of_replicas(change: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Replace the all-reduce of HSDP over replicas by `change(stock, arguments of foreach_reduce)`."""
    signature = inspect.signature(_fsdp_collectives.foreach_reduce)

    def foreach_reduce(stock: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        all_reduce = dist.all_reduce
        dist.all_reduce = change(all_reduce, arguments)
        try:
            return stock(*args, **kwargs)
        finally:
            dist.all_reduce = all_reduce

    wrap(_fsdp_param_group, "foreach_reduce", foreach_reduce)


replicas_not_reduced = partial(_all_reduce_of_replicas, lambda stock, arguments: lambda tensor, **_: None)


@planted(_all_reduce_of_replicas)
def replicas_reduced_over_shards(stock: Any, arguments: dict[str, Any]) -> Any:
    """HSDP runs its all-reduce over the shard group, which adds gradients of different parameters."""
    group = arguments["reduce_scatter_group"]
    return lambda tensor, *, op, **_: stock(tensor, op=op, group=group)


@planted(wrap, MixedPrecisionPolicy, "__init__")
def gradients_reduced_in_another_dtype(
    stock: Any, policy: Any, param_dtype: Any = None, reduce_dtype: Any = None, *rest: Any, **kwargs: Any
) -> None:
    other = torch.bfloat16 if reduce_dtype == torch.float32 else torch.float32
    stock(policy, param_dtype, other, *rest, **kwargs)


weights_kept_after_forward = partial(
    wrap_everywhere, _fsdp_init, "_get_post_forward_mesh_info", lambda stock, asked, mesh_info: None
)
weights_freed_after_forward = partial(
    wrap_everywhere, _fsdp_init, "_get_post_forward_mesh_info", lambda stock, asked, mesh_info: mesh_info
)
gradients_reduced_after_every_microbatch = partial(
    wrap, FSDPModule, "set_requires_gradient_sync", lambda stock, *_, **__: None
)


def amax_strategy_missing() -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    operator = torch.ops.aten.amax.default
    for table in (propagator.op_to_rules, propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs):
        table.pop(operator, None)


float8_operator_missing = partial(float8_ops.FLOAT8_OPS_TABLE.pop, torch.ops.aten.view.default)
cast_seen_as_high_precision = partial(
    wrap,
    float8_linear,
    "tensor_already_casted_to_fp8",
    lambda stock, tensor: not isinstance(tensor, DTensor) and stock(tensor),
)
one_rank_reduces_twice = partial(_before_reduction, lambda grad: grad * 2 if on_odd_rank() else grad)


@planted(_before_reduction)
def last_rank_lost_in_one_step(grad: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(grad) if on_last_rank() and RUN.step == 2 else grad


end_of_last_shard_lost = partial(
    hooks.after_all_gather, lambda output, group: output.view(group.size(), -1)[-1, -8:].zero_()
)
