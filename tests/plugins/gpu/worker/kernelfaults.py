"""Wrong kernels of `torch._scaled_mm`: what a GPU, its driver or a build of torch could do, planted in a rank."""

import os
from collections.abc import Callable

import torch

_right = torch._scaled_mm


def _plant(kernel: Callable[..., torch.Tensor]) -> None:
    torch._scaled_mm = kernel  # type: ignore[attr-defined]


def dropped_scale() -> None:
    """The scale of the second operand is not applied."""

    def kernel(a, b, *, scale_b, **given):
        return _right(a, b, scale_b=torch.ones_like(scale_b), **given)

    _plant(kernel)


def one_scale_for_all_rows() -> None:
    """Every row has the scale of the first one."""

    def kernel(a, b, *, scale_a, **given):
        return _right(
            a, b, scale_a=scale_a.clone().fill_(scale_a.flatten()[0]) if scale_a.numel() else scale_a, **given
        )

    _plant(kernel)


def swapped_rows() -> None:
    """The first two rows are in each other's place."""

    def kernel(*args, **given):
        out = _right(*args, **given)
        return out[[1, 0, *range(2, len(out))]] if len(out) > 1 else out

    _plant(kernel)


def scales_of_other_rows() -> None:
    """A row of 32 scales of blocks is read one too early, as where their order is taken for another."""

    def kernel(a, b, *, scale_a, **given):
        if scale_a.dtype == torch.float8_e8m0fnu:
            scale_a = scale_a.view(torch.uint8).view(-1, 32, 16).roll(1, 1).flatten().view(torch.float8_e8m0fnu)
        return _right(a, b, scale_a=scale_a, **given)

    _plant(kernel)


def dropped_tail() -> None:
    """The last 16 products of every sum are left out, as where K is no multiple of a tile."""

    def kernel(a, b, **given):
        cut = max(16, a.shape[1] - 16)
        return _right(a[:, :cut].contiguous(), b[:cut].t().contiguous().t(), **given)

    _plant(kernel)


def accumulated_in_bfloat16() -> None:
    """Partial sums of 32 products are added up in bfloat16."""

    def kernel(a, b, *, scale_a, scale_b, bias=None, out_dtype, use_fast_accum=False):
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        for at in range(0, a.shape[1], 32):
            total += (a[:, at : at + 32].float() @ b[at : at + 32].float()).bfloat16()
        scaled = total.float() * scale_a * scale_b
        return (scaled if bias is None else scaled + bias).to(out_dtype)

    _plant(kernel)


def bias_before_the_scale() -> None:
    """The bias is scaled too."""

    def kernel(a, b, *, scale_a, scale_b, bias=None, **given):
        if bias is not None:
            bias = (bias * scale_b.flatten()[0]).to(bias.dtype)
        return _right(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, **given)

    _plant(kernel)


def without_nan() -> None:
    """NaN becomes 0."""
    _plant(lambda *args, **given: _right(*args, **given).nan_to_num(0.0))


def in_another_dtype() -> None:
    """The output is in bfloat16, whatever is asked for."""

    def kernel(*args, out_dtype, **given):
        return _right(*args, out_dtype=torch.bfloat16, **given)

    _plant(kernel)


def refuses_e5m2() -> None:
    """Gradients in e5m2 are refused."""

    def kernel(a, b, **given):
        if torch.float8_e5m2 in (a.dtype, b.dtype):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")
        return _right(a, b, **given)

    _plant(kernel)


def dies_in_float16_with_a_bias() -> None:
    """Such a call kills the process."""

    def kernel(a, b, **given):
        if given["out_dtype"] == torch.float16 and given["bias"] is not None:
            os.abort()
        return _right(a, b, **given)

    _plant(kernel)


def cannot_be_planted() -> None:
    """The rank fails before any check."""
    raise RuntimeError("there is no such kernel")
