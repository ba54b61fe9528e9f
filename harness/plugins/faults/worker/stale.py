"""Class B: stale scales and stale FP8 data. Most of them have no effect in the first step.

Class I: something keeps tensors alive that nothing needs any more; no number changes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchao.float8 import float8_scaling_utils, fsdp_utils
from torchao.float8.float8_training_tensor import GemmInputRole
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_last_rank, on_odd_rank, planted, wrap_everywhere
from harness.worker.probes.discovery import converted_linears, linears
from harness.worker.process.process import in_backward
from harness.worker.tensors.names import mark_owned
from harness.worker.tensors.places import local_shard


def _precompute(change: Callable[[Any, nn.Module, int], None]) -> None:
    """Replace the precomputation of scales by `change(stock, model, call)`; calls count from 1."""
    calls = [0]

    def precompute(stock: Any, model: nn.Module) -> None:
        calls[0] += 1
        change(stock, model, calls[0])

    wrap_everywhere(fsdp_utils, "precompute_float8_dynamic_scale_for_fsdp", precompute)


def _weight_shards(model: nn.Module) -> list[Any]:
    weights = [local(linear.weight) for linear in converted_linears(model).values()]
    return [weight for weight in weights if isinstance(weight, WeightWithDynamicFloat8CastTensor)]


def _scales(model: nn.Module) -> list[Any]:
    return [shard._precomputed_scale for shard in _weight_shards(model)]


def _set_scales(model: nn.Module, scales: Iterable[Any]) -> None:
    for shard, scale in zip(_weight_shards(model), scales, strict=True):
        shard._precomputed_scale = scale


precomputed_scale_never_refreshed = partial(_precompute, lambda stock, model, call: stock(model) if call == 1 else None)


def precomputed_scale_one_step_late() -> None:
    late: list[Any] = []

    def change(stock: Any, model: nn.Module, call: int) -> None:
        stock(model)
        fresh = _scales(model)
        _set_scales(model, late or fresh)
        late[:] = fresh

    _precompute(change)


precomputed_scale_stale_in_one_step = partial(
    _precompute, lambda stock, model, call: stock(model) if call != 2 else None
)


def precomputed_scale_stale_in_evaluation() -> None:
    before: list[Any] = []

    def change(stock: Any, model: nn.Module, call: int) -> None:
        stale = _scales(model)
        stock(model)
        before[:] = stale if call > 1 else _scales(model)

    def evaluate(stock: Callable[[], Any], model: nn.Module) -> Any:
        right = _scales(model)
        _set_scales(model, before or right)
        loss = stock()
        _set_scales(model, right)
        return loss

    _precompute(change)
    hooks.around_evaluation(evaluate)


@planted(hooks.around_load)
def precomputed_scale_stale_after_load(stock: Callable[[], Any], model: nn.Module) -> None:
    fsdp_utils.precompute_float8_dynamic_scale_for_fsdp(model)
    initial = _scales(model)
    stock()
    _set_scales(model, initial)


nothing_precomputed_after_load = partial(
    hooks.after_load, lambda model: _set_scales(model, [None] * len(_scales(model)))
)


def old_weight_in_evaluation() -> None:
    kept: list[torch.Tensor] = []

    @torch.no_grad()
    def evaluate(stock: Callable[[], Any], model: nn.Module) -> Any:
        weight = local_shard(hooks.first_weight(model))
        now = weight.clone()
        weight.copy_(kept[0] if kept else now)
        loss = stock()
        weight.copy_(now)
        kept[:] = [mark_owned(now)]
        return loss

    hooks.around_evaluation(evaluate)


precompute_dead_branch = partial(_precompute, lambda stock, model, call: None)


@planted(_precompute)
def precompute_for_one_part(stock: Any, model: nn.Module, call: int) -> None:
    """Scales are precomputed for the first half of the model only; the others fall back to dynamic scaling."""
    stock(model)
    scales = _scales(model)
    part = scales[: len(scales) // 2]
    _set_scales(model, part + [None] * (len(scales) - len(part)))


def _cached_weights(*, data: bool, scale: bool) -> None:
    """Make every cast of a weight return the data, the scale or both of its first cast."""
    first: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def change(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if role is GemmInputRole.WEIGHT:
            key = (local(hp_tensor).data_ptr(), part._axiswise_dim, tuple(part._scale.shape))
            old_data, old_scale = first.setdefault(key, (part._data.clone(), part._scale.clone()))
            part._data = old_data if data else part._data
            part._scale = old_scale if scale else part._scale

    hooks.after_casts(change)


weight_data_stale = partial(_cached_weights, data=True, scale=False)
weight_never_updated = partial(_cached_weights, data=True, scale=True)
weight_scale_stale = partial(_cached_weights, data=False, scale=True)


def _gathered_shards(change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Replace every FP8 shard that this rank contributes to an all-gather by `change(shard, address of its weight)`."""
    kind: Any = WeightWithDynamicFloat8CastTensor
    stock = kind.fsdp_pre_all_gather

    def fsdp_pre_all_gather(self: Any, mesh: Any) -> Any:  # FSDP2 looks at the number of parameters
        (data,), metadata = stock(self, mesh)
        return (change(data, self._tensor.data_ptr()),), metadata

    kind.fsdp_pre_all_gather = fsdp_pre_all_gather


def gathered_shard_of_one_rank_stale() -> None:
    first: dict[int, torch.Tensor] = {}
    _gathered_shards(lambda data, weight: first.setdefault(weight, data.clone()) if on_odd_rank() else data)


def last_rank_gathers_old_weights_in_one_step() -> None:
    first: dict[int, torch.Tensor] = {}

    def change(data: torch.Tensor, weight: int) -> torch.Tensor:
        if on_last_rank() and RUN.step == 1:
            first[weight] = data.clone()
        return first[weight] if on_last_rank() and RUN.step == 2 else data

    _gathered_shards(change)


def backward_uses_latest_scale() -> None:
    latest: list[torch.Tensor] = []

    def change(scale: torch.Tensor, hp_tensor: torch.Tensor, role: Any) -> torch.Tensor:
        if role is not GemmInputRole.WEIGHT:
            return scale
        if not in_backward():
            latest[:] = [scale]
        return latest[0]

    hooks.before_casts(change)


def scale_buffer_shared_by_inputs() -> None:
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    hooks.before_casts(
        lambda scale, hp_tensor, role: (
            kept.setdefault(tuple(hp_tensor.shape), scale) if role is GemmInputRole.INPUT else scale
        )
    )


def input_cast_of_first_microbatch() -> None:
    """A linear casts its input once in a step, and reads that cast in every microbatch."""
    running = hooks.running_linear()
    casts: dict[tuple[Any, int, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        linear = running()
        if linear is not None and role is GemmInputRole.INPUT:
            key = linear, RUN.step, part._axiswise_dim
            part._data, part._scale = casts.setdefault(key, (part._data, part._scale))

    hooks.follow_run()
    hooks.after_casts(keep)


def cast_from_copy_of_first_step() -> None:
    """Weights are copied once, as autocast does in one context around all steps, and cast from these copies."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def cast(stock: Any, hp_tensor: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        if kwargs.get("gemm_input_role") is GemmInputRole.WEIGHT:
            key = local(hp_tensor).data_ptr(), hp_tensor.stride()
            hp_tensor = copies.setdefault(key, mark_owned(hp_tensor.detach().clone()))
        return stock(hp_tensor, *rest, **kwargs)

    wrap_everywhere(float8_scaling_utils, "hp_tensor_to_float8_dynamic", cast)


def cast_buffer_shared_by_operands() -> None:
    """Inputs are cast into a buffer that the cast of the weight of the same linear has overwritten when it is read."""
    latest: list[torch.Tensor] = []

    def share(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if role is GemmInputRole.INPUT:
            latest[:] = [part._data]
        elif role is GemmInputRole.WEIGHT and latest and not in_backward():
            buffer = latest.pop()
            flat = part._data.contiguous().reshape(-1)[: buffer.numel()]
            buffer.view(torch.uint8).reshape(-1)[: flat.numel()].copy_(flat.view(torch.uint8))

    hooks.after_casts(share)


@planted(hooks.after_build)
def weights_stay_gathered_behind_step(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False)


@planted(hooks.after_backward)
def gradient_buffer_polluted(model: nn.Module) -> None:
    if RUN.step == 1:
        _, linear = min(linears(model).items())
        assert linear.weight.grad is not None
        local(linear.weight.grad).add_(local_shard(linear.weight))


def _after_every_block(keep: Callable[[nn.Module, torch.Tensor], object]) -> None:
    """Call `keep(block, output)` after the forward of every block."""

    def watch(model: nn.Module) -> None:
        for block in hooks.blocks(model):
            block.register_forward_hook(lambda block, _, output: keep(block, output) and None)

    hooks.after_build(watch)


output_kept_on_module = partial(_after_every_block, lambda block, output: setattr(block, "last_output", output))


def output_kept_by_hook() -> None:
    outputs: list[torch.Tensor] = []

    def count(grad: torch.Tensor) -> None:
        assert outputs, "no block has run"

    _after_every_block(lambda block, output: outputs.append(output.detach()))
    hooks.after_build(lambda model: next(model.parameters()).register_hook(count))


def outputs_kept_for_two_steps() -> None:
    outputs: list[torch.Tensor] = []

    def keep(block: nn.Module, output: torch.Tensor) -> None:
        outputs[:] = [*outputs, output.detach()] if RUN.step <= 2 else []

    _after_every_block(keep)


def logits_kept_of_every_step() -> None:
    log: list[torch.Tensor] = []

    def change(stock: Any, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        log.append(logits.detach())
        return stock(logits, *args, **options)

    hooks.around_loss(change)


def float8_weights_kept_in_cache() -> None:
    cache: list[torch.Tensor] = []

    def keep(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if role is GemmInputRole.WEIGHT:
            cache.append(part._data)

    hooks.after_casts(keep)


def gathered_weights_kept() -> None:
    buffers: list[torch.Tensor] = []
    hooks.after_all_gather(lambda output, group: buffers.append(output))
