"""Class J: blocks of 128 values, and of 128 x 128, whose scales are float32."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.matrix.recipes import E4M3, FLOAT8_MAX, OPERATORS, SQUARE
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import on_odd_rank, planted, wrap
from harness.worker.probes.discovery import converted_linears
from harness.worker.process.process import in_backward
from harness.worker.tensors.names import mark_owned
from harness.worker.tensors.places import local_part
from harness.worker.tensors.reduction import gathered_copies
from harness.worker.virtual.casts import BLOCKWISE

_LENGTH, _MAX = SQUARE[1], FLOAT8_MAX[E4M3]
Tensor = torch.Tensor


class _Cast(NamedTuple):
    """A cast that happened: change `data` [lines, K] and `scale` [lines or blocks of them, blocks of K] in place."""

    lines: Tensor
    data: Tensor
    scale: Tensor  # its inverse is what lines were multiplied by
    operand: str  # "i", also of gradients; "w"
    dim: int  # the contracted dim of the operand, which is the last of `lines`
    linear: nn.Module

    @property
    def blocks(self) -> Tensor:
        """Return the values [blocks of lines, lines of one, blocks of K, values of one]."""
        return self.lines.float().unflatten(-1, (-1, _LENGTH)).unflatten(0, (len(self.scale), -1))

    def cast_by(self, factors: Tensor) -> None:
        """Cast once more, by other factors of blocks."""
        self.scale.copy_(factors.reciprocal())
        scaled = self.blocks * factors[:, None, :, None]
        self.data.copy_(scaled.flatten(0, 1).flatten(1).clamp(-_MAX, _MAX).to(self.data.dtype))


def _after_casts(change: Callable[[_Cast], object]) -> None:
    """Call `change(cast)` after every cast of a blockwise linear."""
    module = importlib.import_module(BLOCKWISE)
    running: list[nn.Module] = []  # the linear whose casts follow

    def linear_forward(stock: Any, linear: nn.Module, x: Tensor) -> Any:
        running[:] = [linear]
        return stock(linear, x)

    def forward(stock: Any, ctx: Any, *args: Any) -> Any:
        ctx.planted_in = running[0]
        return stock(ctx, *args)

    def backward(stock: Any, ctx: Any, *grads: Tensor) -> Any:
        running[:] = [ctx.planted_in]
        return stock(ctx, *grads)

    def cast(operator: str, stock: Any, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = stock(source, *args, **kwargs)
        operand, dim, *turned, _ = OPERATORS[operator]
        data, scale = (part.t() if turns else part for part, turns in zip(map(local_part, result), turned, strict=True))
        lines, data = (part if dim else part.t() for part in (local_part(source), data))
        change(_Cast(lines, data, scale, operand, dim, running[0]))
        return result

    wrap(module.Float8BlockwiseLinear, "forward", linear_forward)
    wrap(module.fp8_blockwise_mm, "forward", forward)
    wrap(module.fp8_blockwise_mm, "backward", backward)
    for name in filter(vars(module).get, OPERATORS):
        wrap(module, name, partial(cast, name))


def _amaxes(change: Callable[[Tensor], Tensor]) -> None:
    """Scale blocks for the amaxes `change(blocks)` [blocks of lines, blocks of K]."""
    _after_casts(lambda cast: cast.cast_by(_MAX / change(cast.blocks).clamp(min=1e-12)))


def _amax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax((1, 3))


amax_of_127_values = partial(_amaxes, lambda blocks: _amax(blocks[..., : _LENGTH - 1]))
amax_of_signed_slice = partial(_amaxes, lambda blocks: blocks.amax((1, 3)))
scale_of_neighboring_slice = partial(_after_casts, lambda cast: cast.scale.copy_(cast.scale.roll(1, -1)))
slice_scales_in_bfloat16 = partial(_after_casts, lambda cast: cast.scale.copy_(cast.scale.bfloat16()))
smallest_amax_of_slices_too_large = partial(_amaxes, lambda blocks: _amax(blocks).clamp(min=1e-4))
slice_scales_rounded_to_powers = partial(
    _amaxes, lambda blocks: _MAX * torch.exp2((_amax(blocks) / _MAX).log2().ceil())
)


@planted(_amaxes)
def scale_of_half_a_square(blocks: Tensor) -> Tensor:
    """A block of 128 x 128 that two shards hold has the scale of the part of the first one."""
    return _amax(blocks[:, : (blocks.shape[1] + 1) // 2])


@planted(_after_casts)
def last_slice_unscaled(cast: _Cast) -> None:
    """The last block along what is contracted is taken for padding, and cast by the factor 1."""
    factors = cast.scale.reciprocal()
    factors[:, -1] = 1
    cast.cast_by(factors)


@planted(_after_casts)
def slices_along_the_other_dim(cast: _Cast) -> None:
    """Activations are scaled in blocks of 128 tokens instead of 128 features, of which there are as many."""
    if cast.operand == "i" and cast.dim == -1:
        columns = _amax(cast.lines.float().t().unflatten(-1, (-1, _LENGTH))[:, None])
        factors = _MAX / columns.clamp(min=1e-12)
        scaled = cast.lines.float() * factors.t().repeat_interleave(_LENGTH, 0)
        cast.data.copy_(scaled.clamp(-_MAX, _MAX).to(cast.data.dtype))
        cast.scale.copy_(factors.t().reciprocal().reshape(cast.scale.shape))


@planted(_after_casts)
def slice_scale_not_inverted(cast: _Cast) -> None:
    """The matmul is given what values were multiplied by."""
    cast.scale.reciprocal_()


def _kept(change: Callable[[_Cast, Callable[[Tensor], Tensor]], object]) -> None:
    """Call `change(cast, first)` after every cast of a weight; `first(tensor)` is what that was at the first one."""
    kept: dict[Any, Tensor] = {}

    def after(cast: _Cast) -> None:
        if cast.operand == "w":
            place = cast.linear, cast.dim
            change(cast, lambda part: kept.setdefault((*place, part.dtype), mark_owned(part.clone())))

    _after_casts(after)


@planted(_kept)
def square_scale_never_updated(cast: _Cast, first: Callable[[Tensor], Tensor]) -> None:
    """The scales of weights are kept over the update of the optimizer."""
    cast.cast_by(first(cast.scale).reciprocal())


@planted(_kept)
def square_weight_never_cast_again(cast: _Cast, first: Callable[[Tensor], Tensor]) -> None:
    cast.scale.copy_(first(cast.scale))
    cast.data.copy_(first(cast.data))


@planted(_after_casts)
def slice_scales_of_another_rank(cast: _Cast) -> None:
    """One rank multiplies its input by the scales of the rank before it."""
    if cast.operand == "i" and cast.dim == -1 and not in_backward():
        others = gathered_copies(cast.scale.contiguous())
        if on_odd_rank():
            cast.scale.copy_(others[0])


def slice_scales_not_transposed() -> None:
    """In the weight gradient the scales of the input have the order in memory of before they were transposed."""

    def multiply(stock: Any, a: Tensor, b: Tensor, of_a: Tensor, recipe_a: Any, of_b: Tensor, *rest: Any) -> Any:
        if len(of_b) == b.shape[1]:
            of_b.copy_(of_b.t().clone(memory_format=torch.contiguous_format).view(of_b.shape))
        return stock(a, b, of_a, recipe_a, of_b, *rest)

    wrap(importlib.import_module(BLOCKWISE), "_scaled_mm", multiply)


def gradients_in_slices_of_e5m2() -> None:
    def cast(stock: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        data, scale = stock(x, *args, **kwargs)
        return (data.float().to(torch.float8_e5m2) if in_backward() else data), scale

    wrap(importlib.import_module(BLOCKWISE), "triton_fp8_blockwise_act_quant_lhs", cast)


@planted(hooks.after_build)
def one_linear_not_blockwise(model: nn.Module) -> None:
    linears = converted_linears(model)
    linears[hooks.narrowing_linear(linears)].__class__ = nn.Linear
