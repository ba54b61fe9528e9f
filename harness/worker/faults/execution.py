"""Class E: recompute, kernels and saved memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import float8_ops, float8_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.worker.faults.hooks import (
    Recomputing,
    after_build,
    float8_part,
    local,
    module_in_last_block,
    on_last_rank,
    role_of,
    wrap,
    wrap_casts,
)
from harness.worker.probes.probe import in_backward
from harness.worker.targets.reference import build, checkpointing, model
from harness.worker.targets.target import Target

_aten = torch.ops.aten


def _scale_recomputed_times(factor: float) -> None:
    recomputing = Recomputing()

    def make(stock: Any) -> Any:
        return lambda *args, **kwargs: stock(*args, **kwargs) * (factor if recomputing.active else 1.0)

    wrap(float8_utils, "amax_to_scale", make)


def recompute_scale_changed() -> None:
    """Recomputation uses another scale than the forward."""
    _scale_recomputed_times(0.7)


def recompute_scale_changed_by_a_power_of_two() -> None:
    """Recomputation uses half the scale, which changes almost no value."""
    _scale_recomputed_times(0.5)


def recompute_rounds_norms() -> None:
    """Recomputed norms are rounded differently, as if another kernel were fused."""

    def make(stock: Any) -> Any:
        def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = stock(module, x)
            return out.to(torch.bfloat16).to(out.dtype) if in_backward() else out

        return forward

    wrap(nn.RMSNorm, "forward", make)


def recompute_in_high_precision() -> None:
    """Recomputation runs outside the FP8 context."""

    def make(stock: Any) -> Any:
        def forward(module: Float8Linear, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, module.weight) if in_backward() else stock(module, x)

        return forward

    wrap(Float8Linear, "forward", make)


def checkpointing_lost() -> None:
    """Blocks are not wrapped for checkpointing, so nothing is recomputed."""
    wrap(build, "apply_checkpointing", lambda stock: lambda layers, mode: None)


def abs_saved_for_backward() -> None:
    """Selective checkpointing saves the full-size result of abs in addition to its maximum."""
    checkpointing.SAVED_OPS = checkpointing.SAVED_OPS | {_aten.abs.default}


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
    """The FP8 copy of every weight is saved for backward."""

    def make(stock: Any) -> Any:
        def forward(module: Float8Linear, x: torch.Tensor) -> torch.Tensor:
            copy = local(module.weight).detach().float().to(torch.float8_e4m3fn)
            return _Keep.apply(stock(module, x), copy)

        return forward

    wrap(Float8Linear, "forward", make)


def kernel_reads_first_row_scale() -> None:
    """A rowwise kernel applies the first scale of the second operand to all its columns."""

    def make(stock: Any) -> Any:
        def addmm(a: torch.Tensor, a_scale: Any, b: torch.Tensor, b_scale: torch.Tensor, *args: Any, **kw: Any) -> Any:
            if b_scale.numel() > 1:
                b_scale = b_scale.reshape(-1)[:1].expand(b_scale.numel()).reshape(b_scale.shape).contiguous()
            return stock(a, a_scale, b, b_scale, *args, **kw)

        return addmm

    wrap(float8_ops, "addmm_float8_unwrapped", make)


def cast_breaks_one_lane() -> None:
    """A miscompiled cast overwrites every 16th element with its neighbour."""

    def cast(stock: Any, hp_tensor: torch.Tensor, s: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = stock(hp_tensor, s, *rest, **kwargs)
        part = float8_part(result)
        bits = part._data.view(torch.uint8).clone()
        bits[..., 15::16] = bits[..., 14::16][..., : bits[..., 15::16].size(-1)]
        part._data = bits.view(part._data.dtype)
        return result

    wrap_casts(cast)


def cast_flushes_small_values() -> None:
    """The cast flushes subnormal float8 values of gradients to zero."""

    def cast(stock: Any, hp_tensor: torch.Tensor, s: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = stock(hp_tensor, s, *rest, **kwargs)
        if role_of(rest, kwargs) is GemmInputRole.GRAD_OUTPUT:
            part = float8_part(result)
            tiny = torch.finfo(part._data.dtype).smallest_normal
            values = part._data.float()
            part._data = torch.where(values.abs() < tiny, 0.0, values).to(part._data.dtype)
        return result

    wrap_casts(cast)


def axiswise_dim_compared_instead_of_assigned() -> None:
    """Transposing a rowwise tensor does not swap its `axiswise_dim`."""

    def make(stock: Any) -> Any:
        def transpose(operator: Any, args: Any, kwargs: Any = None) -> Any:
            result = stock(operator, args, kwargs or {})
            result._axiswise_dim = args[0]._axiswise_dim
            return result

        return transpose

    table = float8_ops.FLOAT8_OPS_TABLE
    table[_aten.t.default] = make(table[_aten.t.default])


def scale_result_ignored() -> None:
    """A kernel ignores `scale_result`, which training never passes."""

    def make(stock: Any) -> Any:
        return lambda *args, output_scale=None, **kwargs: stock(*args, output_scale=None, **kwargs)

    wrap(float8_ops, "addmm_float8_unwrapped", make)


def _attention(change: Callable[..., torch.Tensor]) -> None:
    """Replace attention by `change(stock, q, k, v, **kwargs)`; all are [batch, heads, seq, head_dim]."""
    wrap(model.F, "scaled_dot_product_attention", lambda stock: functools.partial(change, stock))


def _attention_of_last_block(change: Callable[..., torch.Tensor]) -> None:
    """Replace the attention of the last block alone."""
    inside = [False]

    def watch(target: Target) -> None:
        attention = module_in_last_block(target.model, "attention")
        attention.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        attention.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def attend(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return change(stock, *args, **kwargs) if inside[0] else stock(*args, **kwargs)

    after_build(watch)
    _attention(attend)


def softmax_scale_off() -> None:
    """Attention scales its scores by 0.5 % too much."""
    _attention(lambda stock, q, *rest, **kwargs: stock(q, *rest, scale=1.005 * q.size(-1) ** -0.5, **kwargs))


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
    """The last head of the last block is 0.5 % too large on the last rank, because its values are."""

    def change(stock: Any, q: Any, k: Any, v: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        return stock(q, k, _LastHeadScaled.apply(v, 1.005) if on_last_rank() else v, *rest, **kwargs)

    _attention_of_last_block(change)


def causal_mask_lost_in_last_block() -> None:
    """The last block attends to all tokens instead of the past ones."""
    _attention_of_last_block(lambda stock, *args, is_causal, **kwargs: stock(*args, is_causal=False, **kwargs))


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
    """The backward of attention in the last block scales the gradient of the keys by 0.5 % too much."""

    def change(stock: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        return stock(q, _ScaledGradient.apply(k, 1.005), *rest, **kwargs)

    _attention_of_last_block(change)


def _norm_eps(eps: float) -> None:
    def change(target: Target) -> None:
        norms = [module for module in target.model.modules() if isinstance(module, nn.RMSNorm)]
        assert all(norm.eps != eps for norm in norms) and norms, "there is no norm to change"
        for norm in norms:
            norm.eps = eps

    after_build(change)


def norm_eps_too_large() -> None:
    """Norms add 1e-3 instead of 1e-5 to the mean square."""
    _norm_eps(1e-3)


def norm_eps_of_another_model() -> None:
    """Norms add 1e-6, which Llama 1 used, instead of 1e-5."""
    _norm_eps(1e-6)


def rope_base_of_another_model() -> None:
    """The rotary embedding has the base of Llama 2 (10 000) instead of that of Llama 3 (500 000)."""
    assert model.ROPE_THETA != 10_000.0
    model.ROPE_THETA = 10_000.0
