"""The arguments of a kernel check: float8 operands with their scales, drawn from a seed of its id."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

from harness.trace.device import KernelCheck, Misfit

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Arguments(NamedTuple):
    """The arguments of `_scaled_mm`: `a` is [m, k] row-major, `b` [k, n] column-major, unless the check breaks that."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    use_fast_accum: bool

    def on(self, device: torch.device) -> Arguments:
        """The same on a device, with the same strides."""
        return Arguments._make(each.to(device) if isinstance(each, torch.Tensor) else each for each in self)


def arguments(check: KernelCheck) -> Arguments:
    """The arguments, on the CPU: the same on every machine."""
    draw = torch.Generator().manual_seed(int(hashlib.sha256(check.id.encode()).hexdigest()[:12], 16))
    rowwise = check.scaling == "rowwise"

    def made(shape: tuple[int, int], dtype: torch.dtype, *, low: int) -> tuple[torch.Tensor, torch.Tensor]:
        if check.values == "integers":
            return _integers(shape, dtype, draw, low=low, rowwise=rowwise)
        return _as_torchao_casts(shape, dtype, draw, rowwise=rowwise, positive=check.values == "positive")

    a, scale_a = made((check.m, check.k), FLOAT8[check.a], low=-1)
    b, scale_b = made((check.n, check.k), FLOAT8[check.b], low=0)
    bias = torch.randint(-8, 9, (check.n,), generator=draw).to(OUT[check.out]) if check.bias else None
    _special(check, a, b, scale_a)
    whole = Arguments(a, b.t(), scale_a, scale_b.t() if rowwise else scale_b, bias, OUT[check.out], check.fast)
    return _misfitting(whole, check.misfit)


def _integers(
    shape: tuple[int, int], dtype: torch.dtype, draw: torch.Generator, *, low: int, rowwise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from `low` to 1 or 2, mostly positive so that sums grow, with scales that are powers of two."""
    values = torch.randint(low, 3, shape, generator=draw).clamp(max=2 + low).float()
    exponents = torch.randint(-3, 4, (shape[0], 1) if rowwise else (), generator=draw)
    return values.to(dtype), torch.exp2(exponents.float())


def _as_torchao_casts(
    shape: tuple[int, int], dtype: torch.dtype, draw: torch.Generator, *, rowwise: bool, positive: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values scaled so that the largest, of a row or of all, is the largest of the dtype; inverse scales."""
    values = torch.randn(shape, generator=draw)
    values = values.abs() if positive else values
    if not values.numel():
        return values.to(dtype), torch.ones((shape[0], 1) if rowwise else ())
    amax = values.abs().amax(dim=1, keepdim=True) if rowwise else values.abs().max()
    largest = torch.finfo(dtype).max
    return (values * (largest / amax)).clamp(-largest, largest).to(dtype), amax / largest


def _special(check: KernelCheck, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor) -> None:
    """Put into the operands what the check is about."""
    if check.values == "nan":
        a.view(torch.uint8)[1, 2] = 0x7F  # NaN in both dtypes
        b.view(torch.uint8)[3, 0] = 0xFF
    if check.values == "inf":
        a.view(torch.uint8)[1, 2] = 0x7C  # e5m2: infinity
        a.view(torch.uint8)[2, 0] = 0xFC
    if check.values == "zero_scale":
        scale_a.view(-1)[0] = 0.0


def _misfitting(fitting: Arguments, misfit: Misfit) -> Arguments:
    a, b, scale_a, scale_b, bias = fitting[:5]
    wrong: dict[str, Any] = {}
    match misfit:
        case "a_column_major":
            wrong = {"a": a.t().contiguous().t()}
        case "b_row_major":
            wrong = {"b": b.contiguous()}
        case "scale_float64":
            wrong = {"scale_a": scale_a.double(), "scale_b": scale_b.double()}
        case "scale_shape":
            wrong = {"scale_a": scale_a[: a.shape[0] // 2]}
        case "scale_strided":
            wrong = {"scale_a": scale_a.expand(-1, 2).contiguous()[:, :1]}
        case "bias_dtype":
            assert bias is not None, "this check has a bias"
            wrong = {"bias": bias.to(torch.float16)}
    return fitting._replace(**wrong)
