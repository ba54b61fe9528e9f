"""Class E: recompute, kernels and saved memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torchao.float8 import float8_ops, float8_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.worker.faults.hooks import (
    after_build,
    after_casts,
    in_forward_of,
    last_block,
    local,
    norms,
    on_last_rank,
    wrap,
    wrap_everywhere,
)
from harness.worker.probes.probe import in_backward
from harness.worker.targets.target import Target

_aten = torch.ops.aten


def _scale_recomputed_times(factor: float) -> None:
    recomputing = in_forward_of(lambda _: in_backward())

    def amax_to_scale(stock: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) * (factor if recomputing() else 1.0)

    wrap(float8_utils, "amax_to_scale", amax_to_scale)


def recompute_scale_changed() -> None:
    _scale_recomputed_times(0.7)


def recompute_scale_changed_by_a_power_of_two() -> None:
    _scale_recomputed_times(0.5)


def recompute_rounds_norms() -> None:
    def rounded(norm: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        return out.to(torch.bfloat16).to(out.dtype) if in_backward() else None

    def change(target: Target) -> None:
        for norm in norms(target.model):
            norm.register_forward_hook(rounded)

    after_build(change)


def recompute_in_high_precision() -> None:
    def forward(stock: Any, module: Float8Linear, x: torch.Tensor) -> Any:
        return F.linear(x, module.weight, module.bias) if in_backward() else stock(module, x)

    wrap(Float8Linear, "forward", forward)


def checkpointing_lost() -> None:
    options = {*inspect.signature(torch.utils.checkpoint.checkpoint).parameters, "preserve_rng_state"}

    def checkpoint(stock: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    wrap_everywhere(torch.utils.checkpoint, "checkpoint", checkpoint)


def abs_saved_for_backward() -> None:
    def contexts(stock: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
        def policy(context: Any, operator: Any, *given: Any, **named: Any) -> Any:
            if operator is _aten.abs.default:
                return CheckpointPolicy.MUST_SAVE
            return saved(context, operator, *given, **named)

        return stock(policy if callable(saved) else [*saved, _aten.abs.default], *args, **kwargs)

    wrap_everywhere(torch.utils.checkpoint, "create_selective_checkpoint_contexts", contexts)


class _Keep(torch.autograd.Function):
    """Returns the first tensor and saves the second for backward."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def float8_weight_kept_for_backward() -> None:
    def forward(stock: Any, module: Float8Linear, x: torch.Tensor) -> Any:
        return _Keep.apply(stock(module, x), local(module.weight).detach().float().to(torch.float8_e4m3fn))

    wrap(Float8Linear, "forward", forward)


def kernel_reads_first_row_scale() -> None:
    def addmm(stock: Any, a: Any, a_scale: Any, b: Any, b_scale: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if b_scale.numel() > 1:
            b_scale = b_scale.reshape(-1)[:1].expand(b_scale.numel()).reshape(b_scale.shape).contiguous()
        return stock(a, a_scale, b, b_scale, *args, **kwargs)

    wrap(float8_ops, "addmm_float8_unwrapped", addmm)


def cast_breaks_one_lane() -> None:
    def change(part: Any, *_: Any) -> None:
        bits = part._data.view(torch.uint8).clone()
        bits[..., 15::16] = bits[..., 14::16][..., : bits[..., 15::16].size(-1)]
        part._data = bits.view(part._data.dtype)

    after_casts(change)


def cast_flushes_small_values() -> None:
    def change(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if role is GemmInputRole.GRAD_OUTPUT:
            tiny = torch.finfo(part._data.dtype).smallest_normal
            values = part._data.float()
            part._data = torch.where(values.abs() < tiny, 0.0, values).to(part._data.dtype)

    after_casts(change)


def axiswise_dim_compared_instead_of_assigned() -> None:
    table = float8_ops.FLOAT8_OPS_TABLE
    stock = table[_aten.t.default]

    def transpose(operator: Any, args: Any, kwargs: Any = None) -> Any:
        result = stock(operator, args, kwargs or {})
        result._axiswise_dim = args[0]._axiswise_dim
        return result

    table[_aten.t.default] = transpose


def scale_result_ignored() -> None:
    wrap(
        float8_ops,
        "addmm_float8_unwrapped",
        lambda stock, *args, output_scale=None, **kwargs: stock(*args, output_scale=None, **kwargs),
    )


def _attention(change: Callable[..., torch.Tensor]) -> None:
    """Replace attention by `change(stock, q, k, v, **options)`; all are [batch, heads, seq, head_dim]."""

    names = ("attn_mask", "dropout_p", "is_causal")

    def attend(stock: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return change(stock, query, key, value, **dict(zip(names, args, strict=False)), **kwargs)

    wrap(F, "scaled_dot_product_attention", attend)


def _attention_of_last_block(change: Callable[..., torch.Tensor]) -> None:
    """Replace the attention of the last block alone."""
    inside = [False]

    def watch(target: Target) -> None:
        block = last_block(target.model)
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        block.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def attend(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return change(stock, *args, **kwargs) if inside[0] else stock(*args, **kwargs)

    after_build(watch)
    _attention(attend)


def softmax_scale_off() -> None:
    def change(stock: Any, q: torch.Tensor, *rest: Any, scale: float | None = None, **options: Any) -> torch.Tensor:
        return stock(q, *rest, scale=1.005 * (scale or q.size(-1) ** -0.5), **options)

    _attention(change)


class _LastHeadScaled(torch.autograd.Function):
    """Scales the last head, without keeping anything for backward."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return _last_head_times(heads, factor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _last_head_times(grads[0], ctx.factor), None


def _last_head_times(heads: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = heads.clone()
    scaled[:, -1] *= factor
    return scaled


def last_head_scaled_on_last_rank() -> None:
    def change(stock: Any, q: Any, k: Any, v: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        return stock(q, k, _LastHeadScaled.apply(v, 1.005) if on_last_rank() else v, *rest, **kwargs)

    _attention_of_last_block(change)


def causal_mask_lost_in_last_block() -> None:
    def change(stock: Any, *args: Any, attn_mask: Any = None, is_causal: Any = False, **options: Any) -> torch.Tensor:
        return stock(*args, **options)

    _attention_of_last_block(change)


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] * ctx.factor, None


def attention_backward_scales_keys() -> None:
    def change(stock: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        return stock(q, _ScaledGradient.apply(k, 1.005), *rest, **kwargs)

    _attention_of_last_block(change)


def _norm_eps(eps: float) -> None:
    def change(target: Target) -> None:
        found = [norm for norm in norms(target.model) if hasattr(norm, "eps")]
        assert found, "no norm of the model has an eps"
        for norm in found:
            norm.eps = eps

    after_build(change)


def norm_eps_too_large() -> None:
    _norm_eps(1e-3)


def norm_eps_of_another_model() -> None:
    _norm_eps(1e-6)


def rope_base_of_another_model() -> None:
    from harness.worker.targets.reference import model

    assert model.ROPE_THETA != 10_000.0
    model.ROPE_THETA = 10_000.0
