"""Class A: scale or amax computed over the wrong data or the wrong group."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate
from torchao.float8 import float8_linear, float8_tensor_parallel, float8_training_tensor, float8_utils, fsdp_utils
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import GemmInputRole
from torchao.float8.float8_utils import FP8_TYPES

from harness.matrix.layout import axis_of_group
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_odd_rank, planted, wrap, wrap_everywhere
from harness.worker.probes.discovery import converted_linears
from harness.worker.tensors.reduction import gathered_copies

Change = Callable[..., torch.Tensor]


def _amax(change: Change) -> None:
    """Replace `tensor_to_amax` by `change(stock, x, reduce_amax, device_mesh, *rest)`."""

    def tensor_to_amax(
        stock: Any, x: torch.Tensor, reduce_amax: bool = False, device_mesh: Any = None, *rest: Any
    ) -> torch.Tensor:
        with torch.no_grad():
            return change(stock, x, reduce_amax, device_mesh, *rest)

    wrap(float8_utils, "tensor_to_amax", tensor_to_amax)


def _scale(change: Callable[[Any, torch.Tensor, torch.dtype, bool], torch.Tensor]) -> None:
    """Replace `amax_to_scale` by `change(stock, amax, dtype, power_of_two)`."""

    def amax_to_scale(
        stock: Any, amax: torch.Tensor, float8_dtype: torch.dtype, round_scales_to_power_of_2: bool = False
    ) -> torch.Tensor:
        with torch.no_grad():
            return change(stock, amax, float8_dtype, round_scales_to_power_of_2)

    wrap(float8_utils, "amax_to_scale", amax_to_scale)


amax_not_reduced_over_tp = partial(_amax, lambda stock, x, *rest: _unreduced(stock(x, *rest)))


def _unreduced(amax: torch.Tensor) -> torch.Tensor:
    if not isinstance(amax, DTensor):
        return amax
    placements = [Replicate() if placement.is_partial() else placement for placement in amax.placements]
    return DTensor.from_local(
        amax._local_tensor, amax.device_mesh, placements, run_check=False, shape=amax.shape, stride=amax.stride()
    )


@planted(wrap, float8_tensor_parallel, "hp_tensor_to_float8_dynamic")
def gathered_input_has_local_scale(stock: Any, hp_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(hp_tensor, DTensor):
        return stock(hp_tensor, *args, **kwargs)
    done = stock(hp_tensor.to_local(), *args, **kwargs)
    mesh, placements = hp_tensor.device_mesh, hp_tensor.placements
    return DTensor.from_local(done, mesh, placements, run_check=False, shape=hp_tensor.shape, stride=hp_tensor.stride())


@planted(_amax)
def amax_reduced_over_dp(stock: Any, x: torch.Tensor, reduce_amax: bool, *rest: Any) -> torch.Tensor:
    amax = stock(x, reduce_amax, *rest)
    if not reduce_amax and not isinstance(amax, DTensor):
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return amax


weight_amax_over_world = partial(
    _amax, lambda stock, x, reduce_amax, mesh, *rest: stock(x, reduce_amax, None if reduce_amax else mesh, *rest)
)


@planted(_amax)
def weight_amax_over_replicas(stock: Any, x: torch.Tensor, reduce_amax: bool, mesh: Any, *rest: Any) -> torch.Tensor:
    if reduce_amax:
        groups = distributed_c10d._world.pg_group_ranks
        axes = [axis_of_group(RUN.case.layout, dist.get_rank(), tuple(sorted(ranks))) for ranks in groups.values()]
        group = list(groups)[axes.index("dp_replicate")]
        mesh = SimpleNamespace(get_group=lambda: group)
    return stock(x, reduce_amax, mesh, *rest)


weight_amax_over_two_mesh_dims = partial(
    _amax,
    lambda stock, x, reduce_amax, mesh, *rest: stock(
        x, reduce_amax, mesh._get_root_mesh() if reduce_amax else mesh, *rest
    ),
)
weight_amax_not_reduced_over_shards = partial(_amax, lambda stock, x, reduce_amax, *rest: stock(x, False, *rest))


@planted(wrap_everywhere, fsdp_utils, "precompute_float8_dynamic_scale_for_fsdp")
def precomputed_amax_not_reduced(stock: Any, model: torch.nn.Module) -> None:
    stock(model)
    for linear in converted_linears(model).values():
        shard: Any = local(linear.weight)
        amax = shard._tensor.abs().max()
        shard._precomputed_scale = float8_utils.amax_to_scale(amax, shard._dtype)


amax_reduction_missing_on_one_rank = partial(
    _amax, lambda stock, x, reduce_amax, *rest: stock(x, reduce_amax and not on_odd_rank(), *rest)
)
amax_without_abs = partial(_amax, lambda stock, x, *rest: stock(torch.clamp(x, min=0), *rest))


@planted(_amax)
def amax_over_half_of_the_rows(stock: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Compute the amax over the first half of the rows, as if the tensor were cast before the rest is gathered."""
    tensorwise = len(rest) < 3 or rest[2] is ScalingGranularity.TENSORWISE
    return stock(x[: max(1, x.size(0) // 2)] if tensorwise else x, *rest)


eps_lost = partial(setattr, float8_utils, "EPS", 0.0)


def _maximum_of(other: torch.dtype, *, instead_of: torch.dtype) -> None:
    def change(stock: Any, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
        return stock(amax, other if dtype == instead_of else dtype, power_of_two)

    _scale(change)


e4m3_maximum_for_e5m2 = partial(_maximum_of, torch.float8_e4m3fn, instead_of=torch.float8_e5m2)
e5m2_maximum_for_e4m3 = partial(_maximum_of, torch.float8_e5m2, instead_of=torch.float8_e4m3fn)
fnuz_maximum = partial(_maximum_of, torch.float8_e4m3fnuz, instead_of=torch.float8_e4m3fn)
scale_margin = partial(_scale, lambda stock, amax, dtype, power_of_two: stock(amax, dtype, power_of_two) * 0.5)


def one_linear_scaled_with_margin() -> None:
    """A margin of one bit in one linear alone: the last that narrows maps its amax to half of the maximum."""
    chosen: list[nn.Linear | None] = [None]

    def choose(model: nn.Module) -> None:
        linears = converted_linears(model)
        chosen[0] = linears[hooks.narrowing_linear(linears)]

    hooks.after_build(choose)
    inside = hooks.in_forward_of(lambda linear: linear is chosen[0])
    _scale(lambda stock, *args: stock(*args) * (0.5 if inside() else 1.0))


@planted(_scale)
def scale_in_float32(stock: Any, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    if power_of_two:
        return stock(amax, dtype, power_of_two)
    assert dtype in FP8_TYPES
    return torch.reciprocal(torch.clamp(amax.float(), min=float8_utils.EPS)) * torch.finfo(dtype).max


power_of_two_lost = partial(_scale, lambda stock, amax, dtype, power_of_two: stock(amax, dtype, False))


@planted(_scale)
def power_of_two_rounded_up(stock: Any, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    scale = stock(amax, dtype, False)
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


clamp_dropped = partial(
    wrap, float8_training_tensor, "to_fp8_saturated", lambda stock, x, float8_dtype: x.to(float8_dtype)
)


@planted(wrap, float8_linear, "hp_tensor_to_float8_dynamic")
def rowwise_weight_scaled_tensorwise(stock: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("gemm_input_role") is GemmInputRole.WEIGHT:
        kwargs |= {"scaling_granularity": ScalingGranularity.TENSORWISE, "axiswise_dim": None}
    return stock(*args, **kwargs)


rowwise_axis_swapped = partial(
    wrap,
    float8_linear,
    "get_maybe_axiswise_dim",
    lambda stock, axiswise_dim, granularity: stock(0 if axiswise_dim == -1 else -1, granularity),
)


def _scales_after_cast(change: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> None:
    """Replace the rowwise scales of a cast result by `change(scale, hp_tensor, role)`; its data are unchanged."""

    def replace(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if part._scale.numel() > 1:
            part._scale = change(part._scale, hp_tensor, role)

    hooks.after_casts(replace)


row_scales_shifted = partial(_scales_after_cast, lambda scale, *_: scale.reshape(-1).roll(1).view(scale.shape))
first_row_scale_for_all = partial(
    _scales_after_cast, lambda scale, *_: scale.reshape(-1)[:1].expand(scale.numel()).reshape(scale.shape)
)


@planted(_scales_after_cast)
def row_scales_of_another_rank(scale: torch.Tensor, hp_tensor: torch.Tensor, role: Any) -> torch.Tensor:
    if role is not GemmInputRole.WEIGHT or not isinstance(hp_tensor, DTensor):
        return scale
    group = hp_tensor.device_mesh.get_group()
    return gathered_copies(scale, group)[(group.rank() + 1) % group.size()]


def _amax_of_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the amax of every row of activations by `change(amax)`, [rows, 1]."""

    @planted(_amax)
    def changed(stock: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        amax: torch.Tensor = stock(x, *rest)
        if amax.dim() > 1 and amax.size(-1) == 1 < amax.size(0):
            local(amax).copy_(change(local(amax)))
        return amax

    changed()


amax_over_the_batch = partial(_amax_of_rows, lambda amax: amax.max().expand_as(amax))
amax_of_rows_that_pad = partial(_amax_of_rows, lambda amax: amax.maximum(amax.flatten()[-1]))
