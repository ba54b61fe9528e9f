"""Class E: recompute, kernels and saved memory. Class F: shapes, padding and hardware rules."""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torchao.float8 import float8_ops, float8_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole
from torchao.float8.float8_utils import _get_min_alignment

from harness.matrix.case import Case
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, on_last_rank, on_odd_rank, planted, wrap, wrap_everywhere
from harness.worker.process.process import in_backward
from harness.worker.targets.data import unpadded_rows
from harness.worker.tensors.places import local_shard, place_of
from harness.worker.virtual import scaled_mm

_aten = torch.ops.aten


def _scale_recomputed_times(factor: float) -> None:
    recomputing = hooks.in_forward_of(lambda _: in_backward())
    wrap(
        float8_utils,
        "amax_to_scale",
        lambda stock, *args, **kwargs: stock(*args, **kwargs) * (factor if recomputing() else 1.0),
    )


recompute_scale_changed = partial(_scale_recomputed_times, 0.7)
recompute_scale_changed_by_a_power_of_two = partial(_scale_recomputed_times, 0.5)


@planted(hooks.after_build)
def recompute_rounds_norms(model: nn.Module) -> None:
    for norm in hooks.norms(model):
        norm.register_forward_hook(lambda _, __, out: out.bfloat16().to(out.dtype) if in_backward() else None)


@planted(wrap, Float8Linear, "forward")
def recompute_in_high_precision(stock: Any, module: Float8Linear, x: torch.Tensor) -> Any:
    return F.linear(x, module.weight, module.bias) if in_backward() else stock(module, x)


@planted(wrap, Float8Linear, "forward")
def recomputed_twice(stock: Any, linear: Float8Linear, x: torch.Tensor) -> Any:
    with torch.no_grad():
        _ = in_backward() and stock(linear, x)
    return stock(linear, x)


def recomputed_matmul_by_another_scale() -> None:
    recomputing = hooks.in_forward_of(lambda _: in_backward())
    wrap(
        float8_ops,
        "addmm_float8_unwrapped",
        lambda stock, a, scale, *rest, **given: stock(a, scale * (2 if recomputing() else 1), *rest, **given),
    )


def checkpointing_lost() -> None:
    options = {*inspect.signature(torch.utils.checkpoint.checkpoint).parameters, "preserve_rng_state"}

    def checkpoint(stock: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    wrap_everywhere(torch.utils.checkpoint, "checkpoint", checkpoint)


@planted(wrap_everywhere, torch.utils.checkpoint, "create_selective_checkpoint_contexts")
def abs_saved_for_backward(stock: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
    def policy(context: Any, operator: Any, *given: Any, **named: Any) -> Any:
        if operator is _aten.abs.default:
            return CheckpointPolicy.MUST_SAVE
        return saved(context, operator, *given, **named)

    return stock(policy if callable(saved) else [*saved, _aten.abs.default], *args, **kwargs)


class _Keep(torch.autograd.Function):
    """Return the first tensor and save the second for backward."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


@planted(wrap, Float8Linear, "forward")
def float8_weight_kept_for_backward(stock: Any, module: Float8Linear, x: torch.Tensor) -> Any:
    return _Keep.apply(stock(module, x), local(module.weight).detach().float().to(torch.float8_e4m3fn))


@planted(wrap, float8_ops, "addmm_float8_unwrapped")
def kernel_reads_first_row_scale(
    stock: Any, a: Any, a_scale: Any, b: Any, b_scale: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if b_scale.numel() > 1:
        b_scale = b_scale.reshape(-1)[:1].expand(b_scale.numel()).reshape(b_scale.shape).contiguous()
    return stock(a, a_scale, b, b_scale, *args, **kwargs)


def _partial_output_of_one_rank_times(factor: float, when: Callable[[], bool]) -> None:
    adds_up = hooks.in_forward_of(
        lambda linear: any(placement.is_shard(1) for placement in getattr(linear.weight, "placements", ()))
    )

    def addmm(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        product: torch.Tensor = stock(*args, **kwargs)
        return product * factor if adds_up() and on_odd_rank() and when() else product

    wrap(float8_ops, "addmm_float8_unwrapped", addmm)


partial_output_of_one_rank_off = partial(_partial_output_of_one_rank_times, 1.004, lambda: True)
partial_output_off_in_a_late_step = partial(_partial_output_of_one_rank_times, 1.01, lambda: RUN.step == hooks.LATE)


@planted(hooks.after_casts)
def cast_breaks_one_lane(part: Any, *_: Any) -> None:
    bits = part._data.view(torch.uint8).clone()
    bits[..., 15::16] = bits[..., 14::16][..., : bits[..., 15::16].size(-1)]
    part._data = bits.view(part._data.dtype)


@planted(hooks.after_casts)
def cast_flushes_small_values(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
    if role is GemmInputRole.GRAD_OUTPUT:
        tiny = torch.finfo(part._data.dtype).smallest_normal
        values = part._data.float()
        part._data = torch.where(values.abs() < tiny, 0.0, values).to(part._data.dtype)


def axiswise_dim_compared_instead_of_assigned() -> None:
    table = float8_ops.FLOAT8_OPS_TABLE
    stock = table[_aten.t.default]

    def transpose(operator: Any, args: Any, kwargs: Any = None) -> Any:
        result = stock(operator, args, kwargs or {})
        result._axiswise_dim = args[0]._axiswise_dim
        return result

    table[_aten.t.default] = transpose


scale_result_ignored = partial(
    wrap,
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

    def watch(model: nn.Module) -> None:
        block = hooks.last_block(model)
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        block.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    hooks.after_build(watch)
    _attention(lambda stock, *args, **kwargs: change(stock, *args, **kwargs) if inside[0] else stock(*args, **kwargs))


def _softmax_scale_times(factor: float, where: Callable[[], bool] = lambda: True) -> None:
    def attend(stock: Any, q: torch.Tensor, *rest: Any, scale: float | None = None, **options: Any) -> torch.Tensor:
        return stock(q, *rest, scale=factor * (scale or q.size(-1) ** -0.5), **options)

    if where():
        _attention(attend)


softmax_scale_off = partial(_softmax_scale_times, 1.005)
softmax_scale_off_under_tp = partial(_softmax_scale_times, 1.003)
compiled_softmax_scale_off_on_one_rank = partial(_softmax_scale_times, 1.05, on_odd_rank)


def another_activation_under_tp() -> None:
    """A GELU of another form; a SiLU that is 0.3 % too large."""
    wrap(F, "gelu", lambda stock, x, approximate="none": stock(x, "none" if approximate == "tanh" else "tanh"))
    wrap(F, "silu", lambda stock, x, *inplace: stock(x, *inplace) * 1.003)


@planted(hooks.before_microbatch)
def rope_changed_in_forward(model: nn.Module, number: int) -> None:
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert buffers, "the model has no buffer of numbers"
    for buffer in buffers if (RUN.step, number) == (1, 1) else ():
        buffer.mul_(1.003)


one_rank_exits = partial(hooks.before_update, lambda model: on_odd_rank() and os._exit(3))


def _last_head_times(heads: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = heads.clone()
    scaled[:, -1] *= factor
    return scaled


class _LastHeadScaled(torch.autograd.Function):
    """Scales the last head, without keeping anything for backward."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return _last_head_times(heads, factor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _last_head_times(grads[0], ctx.factor), None


@planted(_attention_of_last_block)
def last_head_scaled_on_last_rank(
    stock: Any, q: Any, k: Any, v: torch.Tensor, *rest: Any, **kwargs: Any
) -> torch.Tensor:
    return stock(q, k, _LastHeadScaled.apply(v, 1.005) if on_last_rank() else v, *rest, **kwargs)


causal_mask_lost_in_last_block = partial(
    _attention_of_last_block,
    lambda stock, *args, attn_mask=None, is_causal=False, **options: stock(*args, **options),
)
attention_backward_scales_keys = partial(
    _attention_of_last_block,
    lambda stock, q, k, *rest, **options: stock(q, hooks.with_gradient(k, lambda grad: grad * 1.005), *rest, **options),
)


def _norm_eps(eps: float) -> None:
    def change(model: nn.Module) -> None:
        with_eps = [norm for norm in hooks.norms(model) if hasattr(norm, "eps")]
        assert with_eps, "no norm of the model has an eps"
        for norm in with_eps:
            norm.eps = eps

    hooks.after_build(change)


norm_eps_too_large = partial(_norm_eps, 1e-3)
norm_eps_of_another_model = partial(_norm_eps, 1e-6)


def rope_base_of_another_model() -> None:
    from harness.worker.targets.reference import model

    assert model.ROPE_THETA != 10_000.0
    model.ROPE_THETA = 10_000.0


@planted(wrap, float8_ops, "pad_tensor_for_matmul")
def padding_not_zeroed(stock: Any, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    extra = _get_min_alignment(tensor.size(dims), 16) - tensor.size(dims)
    widths = (0, extra) if dims == 1 else (0, 0, 0, extra)
    return F.pad(tensor.view(torch.uint8), widths, value=0x7F).view(tensor.dtype)


@planted(wrap, float8_ops, "pad_tensor_for_matmul")
def padding_on_one_operand_shifted(stock: Any, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    padded: torch.Tensor = stock(tensor, dims)
    extra = padded.size(dims) - tensor.size(dims)
    return padded.view(torch.uint8).roll(extra, dims).view(tensor.dtype) if dims == 1 else padded


alignment_rule_ignored = partial(wrap, scaled_mm, "refusal", lambda stock, *_: None)


def _vocabulary_mask(change: Callable[..., torch.Tensor]) -> None:
    from harness.worker.targets.reference import loss

    wrap(loss, "mask_padded_vocab", change)


padded_vocabulary_not_masked = partial(_vocabulary_mask, lambda stock, logits, case: logits)


@planted(_vocabulary_mask)
def padded_vocabulary_masked_short(stock: Any, logits: torch.Tensor, case: Case) -> Any:
    return stock(logits, replace(case, model=replace(case.model, vocab_size=case.model.vocab_size + 1)))


@planted(hooks.after_build)
@torch.no_grad()
def padded_weight_rows_not_zeroed(model: nn.Module) -> None:
    for weight in model.parameters():
        place = place_of(weight)
        rows = unpadded_rows(place.shape, RUN.case.model)
        if rows != place.shape[:1]:
            local_shard(weight)[max(0, rows[0] - place.offset[0]) :].fill_(100.0)
