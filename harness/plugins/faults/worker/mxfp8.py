"""Class J: blocks of MXFP8 and their scales, and which cast a matmul uses."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Partial, Replicate

from harness.matrix.recipes import E4M3, FLOAT8_MAX, MX
from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, on_odd_rank, planted, wrap, wrap_everywhere
from harness.worker.probes.discovery import converted_linears
from harness.worker.process.process import in_backward
from harness.worker.tensors.names import mark_owned
from harness.worker.tensors.places import local_part
from harness.worker.tensors.reduction import gathered_copies

_PACKAGE = "torchao.prototype"  # imported when a fault is planted: the virtual device stands in for its kernels
_LINEAR = f"{_PACKAGE}.moe_training.mxfp8_linear"
_WRAPPER = f"{_PACKAGE}.moe_training.tensor"
_TENSOR = f"{_PACKAGE}.mx_formats.mx_tensor"
_LENGTH = MX[1]
_EXPONENT_BIAS = 127
_NAN = 255  # as an exponent
_NAN_DATA = 0x7F
_MAX = FLOAT8_MAX[E4M3]
_HALF_WAY = 464.0  # to what would come after _MAX: above it, a cast that does not saturate returns NaN


class _Cast(NamedTuple):
    """A cast of rows [rows, K] that happened: change `data` and `exponents` [rows, K / 32] in place.

    What matmuls contract is last: `dim` says whether that is the last dim of the operand (-1) or the first (0).
    """

    rows: torch.Tensor
    data: torch.Tensor
    exponents: torch.Tensor  # biased, uint8
    role: str
    dim: int
    linear: nn.Module

    @property
    def blocks(self) -> torch.Tensor:
        return self.rows.float().unflatten(-1, (-1, _LENGTH))

    @property
    def scaled(self) -> torch.Tensor:
        return self.blocks * torch.exp2(_EXPONENT_BIAS - self.exponents.float()).unsqueeze(-1)

    @property
    def is_first_of_w2(self) -> bool:
        """True for the weight in forward of the last linear that narrows."""
        return (self.role, self.dim) == ("weight", -1) and _is_last_narrowing(self.linear)

    def cast_by(self, exponents: torch.Tensor) -> None:
        """Cast the rows once more, by other scales."""
        self.exponents.copy_(exponents)
        self.data.copy_(self.scaled.clamp(-_MAX, _MAX).flatten(-2).to(self.data.dtype))


def _is_last_narrowing(linear: nn.Module) -> bool:
    linears = converted_linears(RUN.target.model)
    return linear is linears[hooks.narrowing_linear(linears)]


def _after_casts(change: Callable[[_Cast], object]) -> None:
    """Call `change(cast)` after every cast of a linear in MXFP8."""
    module = importlib.import_module(_LINEAR)
    running: list[nn.Module] = []  # the linear whose casts follow
    roles: list[str] = []  # of these casts

    def linear_forward(stock: Any, linear: nn.Module, x: torch.Tensor) -> Any:
        running[:] = [linear]
        return stock(linear, x)

    def forward(stock: Any, ctx: Any, *args: Any) -> Any:
        ctx.planted_in, roles[:] = running[0], ("input", "weight")
        return stock(ctx, *args)

    def backward(stock: Any, ctx: Any, *grads: torch.Tensor) -> Any:
        running[:], roles[:] = [ctx.planted_in], ("grad_output", "weight", "grad_output", "input")
        return stock(ctx, *grads)

    def cast(dim: int, stock: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = stock(source, *args, **kwargs)
        rows, data, scale = map(local_part, (source, result.qdata, result.scale))
        rows = rows if dim else rows.t()
        change(_Cast(rows, data, scale.view(torch.uint8), roles.pop(0), dim, running[0]))
        return result

    for kind in (nn.Linear, module.MXFP8Linear):
        wrap(kind, "forward", linear_forward)
    wrap(module.mx_mm, "forward", forward)
    wrap(module.mx_mm, "backward", backward)
    wrap(module.MXTensor, "to_mx", partial(cast, -1))
    wrap(module, "_to_mxfp8_dim1_kernel_wrapper", partial(cast, 0))


def _amaxes(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Scale blocks for the amaxes `change(blocks)` [rows, K / 32], rounded up as RCEIL does."""

    _after_casts(lambda cast: cast.cast_by(_rounded_up(change(cast.blocks))))


def _rounded_up(amax: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents that RCEIL takes."""
    return torch.log2(amax / _MAX).ceil().clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS) + _EXPONENT_BIAS


def _amax(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(-1)


amax_of_signed_block = partial(_amaxes, lambda blocks: blocks.amax(-1).clamp(min=0))
amax_of_31_values = partial(_amaxes, lambda blocks: _amax(blocks[..., : _LENGTH - 1]))


@planted(_amaxes)
def scale_of_64_values(blocks: torch.Tensor) -> torch.Tensor:
    """Two blocks share a scale, as if they had 64 values."""
    amax = _amax(blocks)
    return amax.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)


@planted(_amaxes)
def last_block_taken_for_padded(blocks: torch.Tensor) -> torch.Tensor:
    """Mask the second half of the last block of a row."""
    amax = _amax(blocks)
    amax[:, -1] = _amax(blocks[:, -1, : _LENGTH // 2])
    return amax


def _block(change: Callable[[_Cast, torch.Tensor], object]) -> None:
    """Call `change(cast, exponent)` with the exponent of the last block in row 17 of one weight."""
    _after_casts(lambda cast: change(cast, cast.exponents[17, -1]) if cast.is_first_of_w2 else None)


def _block_scale_times(power: int) -> None:
    _block(lambda cast, exponent: cast.cast_by((exponent.add_(power), cast.exponents)[1]))


scale_of_one_block_doubled = partial(_block_scale_times, 1)
scale_of_one_block_halved = partial(_block_scale_times, -1)
scale_of_one_block_nan = partial(_block, lambda cast, exponent: exponent.fill_(_NAN))


@planted(_after_casts)
def blocks_swapped(cast: _Cast) -> None:
    """The data of every two blocks are swapped, their scales are not."""
    cast.data.copy_(cast.data.unflatten(-1, (-1, 2, _LENGTH)).flip(-2).flatten(-3))


block_scales_shifted = partial(_after_casts, lambda cast: cast.exponents.copy_(cast.exponents.roll(1, -1)))


@planted(_after_casts)
def overflow_becomes_nan(cast: _Cast) -> None:
    """The cast does not saturate, as eager casts of torch before 2.12 do not, and nothing clamps before it."""
    over = cast.scaled.flatten(-2).abs() > _HALF_WAY
    cast.data.view(torch.uint8).masked_fill_(over, _NAN_DATA)


@planted(_after_casts)
def blocks_along_the_other_dim(cast: _Cast) -> None:
    """The weight of forward is cast in blocks along its first dim; scales fit, because there are as many."""
    if (cast.role, cast.dim) == ("weight", -1):
        blocks = cast.rows.float().t().unflatten(-1, (-1, _LENGTH))
        exponents = _rounded_up(_amax(blocks))
        scaled = blocks * torch.exp2(_EXPONENT_BIAS - exponents).unsqueeze(-1)
        _replace(cast, scaled.flatten(-2).t(), exponents.t().reshape(cast.exponents.shape))


def _kept(change: Callable[[_Cast, dict[Any, tuple[torch.Tensor, torch.Tensor]]], object]) -> None:
    """Call `change(cast, kept)` after every cast; `kept` is a dictionary of copies of data and exponents."""
    kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    _after_casts(lambda cast: change(cast, kept))


def _copies(cast: _Cast) -> tuple[torch.Tensor, torch.Tensor]:
    return mark_owned(cast.data.clone()), mark_owned(cast.exponents.clone())


def _weight_of_forward(cast: _Cast, kept: dict[Any, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keep what the cast of a weight for forward gave, and return it at the cast for backward; None at other casts."""
    if cast.role != "weight":
        return None
    if cast.dim == -1:
        kept[cast.linear] = _copies(cast)
        return None
    return kept[cast.linear]


def _place(cast: _Cast) -> tuple[nn.Module, str, int]:
    return cast.linear, cast.role, cast.dim


def _replace(cast: _Cast, data: torch.Tensor, exponents: torch.Tensor) -> None:
    cast.data.copy_(data)
    cast.exponents.copy_(exponents)


@planted(_kept)
def mxfp8_weight_never_cast_again(cast: _Cast, kept: dict[Any, Any]) -> None:
    """A cache keeps the cast weights over the update of the optimizer."""
    if cast.role == "weight":
        _replace(cast, *kept.setdefault(_place(cast), _copies(cast)))


@planted(_kept)
def transpose_keeps_block_scales(cast: _Cast, kept: dict[Any, Any]) -> None:
    """The cast along the first dim gets the scales of the cast along the last dim, in their order in memory."""
    if of_forward := _weight_of_forward(cast, kept):
        cast.exponents.copy_(of_forward[1].reshape(cast.exponents.shape))


@planted(_kept)
def dgrad_transposes_weight_of_forward(cast: _Cast, kept: dict[Any, Any]) -> None:
    """The gradient of the input uses the weight of forward, transposed: its blocks are not along what is summed."""
    if of_forward := _weight_of_forward(cast, kept):
        data, exponents = of_forward
        _replace(cast, data.t(), exponents[::_LENGTH].t().repeat_interleave(_LENGTH, 0))


@planted(_kept)
def microbatches_share_input_cast(cast: _Cast, kept: dict[Any, Any]) -> None:
    """The input that the first microbatch cast is multiplied in every microbatch."""
    if cast.role == "input" and cast.dim == -1:
        _replace(cast, *kept.setdefault((RUN.step, cast.linear), _copies(cast)))


@planted(_kept)
def wgrad_scaled_by_first_microbatch(cast: _Cast, kept: dict[Any, Any]) -> None:
    """The weight gradient of every microbatch is contracted by the input scales of the first one."""
    if cast.role == "input" and cast.dim == 0:
        _, exponents = kept.setdefault((RUN.step, cast.linear), _copies(cast))
        cast.exponents.copy_(exponents)


@planted(_after_casts)
def block_scales_of_another_rank(cast: _Cast) -> None:
    """One rank multiplies its input by the scales of the rank before it."""
    if cast.role == "input" and cast.dim == -1:
        others = gathered_copies(cast.exponents)
        if on_odd_rank():
            cast.exponents.copy_(others[0])


# What a matmul reads: scales in tiles of 128 rows by 4 blocks.


def _blocked(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Replace the swizzling of scales [rows, blocks] by `change(stock, scales)`, which returns as many, padded."""
    wrap(importlib.import_module(_TENSOR), "to_blocked", change)


@planted(_blocked)
def block_scales_not_swizzled(stock: Any, scales: torch.Tensor) -> torch.Tensor:
    return _padded(scales).flatten()


@planted(_blocked)
def block_scales_swizzled_twice(stock: Any, scales: torch.Tensor) -> torch.Tensor:
    swizzled: torch.Tensor = stock(scales)
    return stock(swizzled.view(_padded(scales).shape))


def _padded(scales: torch.Tensor) -> torch.Tensor:
    rows, blocks = scales.shape
    bits = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    return bits.view(scales.dtype)


# Tensor parallelism.


@planted(wrap, Partial, "_reduce_shard_value")
def partial_output_of_one_rank_lost(stock: Any, self: Any, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """Leave one rank out of the output of row-parallel linears, whose sum is scattered over the sequence."""
    is_output = type(self) is Partial  # not of an embedding
    return stock(self, torch.zeros_like(tensor) if is_output and on_odd_rank() else tensor, *args)


def operands_gathered_instead_of_reduced() -> None:
    """Where the contracted dim is sharded, ranks gather both operands and multiply them whole."""

    def multiply(stock: Any, a: Any, b: Any, *args: Any) -> Any:
        if isinstance(a.qdata, DTensor) and any(placement.is_shard(1) for placement in a.qdata.placements):
            for operand in (a, b):
                operand.qdata, operand.scale = _gathered(operand.qdata), _gathered(operand.scale)
        return stock(a, b, *args)

    wrap(importlib.import_module(_TENSOR), "_addmm_mx_dispatch", multiply)


def _gathered(shards: DTensor) -> Any:
    """Return the whole tensor on every rank, in the order in memory of its shards."""
    is_transposed = not shards.to_local().is_contiguous()
    rows: Any = shards.t() if is_transposed else shards
    whole = rows.view(torch.uint8).redistribute(placements=[Replicate()] * shards.device_mesh.ndim).view(shards.dtype)
    return whole.t() if is_transposed else whole


# Options and conversion.


def _options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let every linear in MXFP8 run with the options that `change(options)` changes."""
    importlib.import_module(_WRAPPER)
    wrap_everywhere(
        importlib.import_module(_LINEAR),
        "_to_mxfp8_then_scaled_mm",
        lambda stock, *args, **options: stock(*args, **(options | change(options))),
    )


def _rounding(name: str) -> dict[str, Any]:
    return {"scale_calculation_mode": pkgutil.resolve_name(f"{_PACKAGE}.mx_formats.config:ScaleCalculationMode")[name]}


block_scales_rounded_down = partial(_options, lambda _: _rounding("FLOOR"))
block_scales_rounded_up = partial(_options, lambda _: _rounding("RCEIL"))
one_rank_rounds_block_scales_down = partial(_options, lambda _: _rounding("FLOOR") if on_odd_rank() else {})
recompute_rounds_block_scales_down = partial(_options, lambda _: _rounding("FLOOR") if in_backward() else {})
mxfp8_weight_gradient_in_high_precision = partial(_options, lambda _: {"wgrad_with_hp": True})
mxfp8_weight_gradient_in_mxfp8 = partial(_options, lambda _: {"wgrad_with_hp": False})


def mxfp8_bias_dropped() -> None:
    module = importlib.import_module(_LINEAR)
    options = ("kernel_preference", "scale_calculation_mode", "wgrad_with_hp")

    def forward(stock: Any, linear: Any, x: torch.Tensor) -> Any:
        given = {name: getattr(linear, name) for name in options}
        return module._to_mxfp8_then_scaled_mm(x, linear.weight, **given)

    wrap(module.MXFP8Linear, "forward", forward)


@planted(hooks.after_build)
def one_linear_not_in_mxfp8(model: nn.Module) -> None:
    linears = converted_linears(model)
    linears[hooks.narrowing_linear(linears)].__class__ = nn.Linear


def wrapper_lost_in_all_gather() -> None:
    """FSDP2 gives one linear its gathered weight without torchao's wrapper, which then multiplies in bfloat16."""
    chosen: list[int] = []
    kind = importlib.import_module(_WRAPPER).MXFP8TrainingWeightWrapperTensor

    def choose(model: nn.Module) -> None:
        linears = converted_linears(model)
        chosen.append(local_part(linears[hooks.narrowing_linear(linears)].weight).data_ptr())

    def post_all_gather(stock: Any, weight: Any, outputs: Any, *args: Any, out: Any = None) -> Any:
        if weight._data.data_ptr() not in chosen:
            return stock(weight, outputs, *args, out=out)
        (data,) = outputs
        return (data, outputs) if out is None else None

    hooks.after_build(choose)
    wrap(kind, "fsdp_post_all_gather", post_all_gather)


@planted(wrap, _fsdp_collectives, "_get_param_all_gather_inputs")
def one_rank_casts_weights_before_all_gather(stock: Any, params: list[Any]) -> Any:
    """One rank sends weights that were in MXFP8 already; after the all-gather, every rank casts them once more."""
    inputs = stock(params)
    kind = importlib.import_module(_LINEAR).MXFP8Linear
    for param, tensors in zip(params, inputs, strict=True):
        if on_odd_rank() and isinstance(param._module_info.module, kind) and param._module_info.param_name == "weight":
            tensors[:] = [_cast_and_back(tensor) for tensor in tensors]
    return inputs


def _cast_and_back(shard: torch.Tensor) -> torch.Tensor:
    """Blocks are along rows: a second cast of the same blocks would have no effect."""
    blocks = shard.float().view(_LENGTH, -1).t()
    scale = torch.exp2(_rounded_up(_amax(blocks)) - _EXPONENT_BIAS).unsqueeze(-1)
    values = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return values.t().to(shard.dtype).reshape_as(shard)
