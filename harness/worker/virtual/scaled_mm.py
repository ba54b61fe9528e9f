"""The exact `aten::_scaled_mm`, for any device: the values and argument checks of the CUDA kernel, and usably fast.

Multiplies and accumulates in float64, where products of e4m3 values and sums of thousands of them are exact. So the
result does not depend on the order of summation, the number of threads, the CPU, or the sharding of M and N, and is
rounded once, to the output dtype. A GPU accumulates in float32 (less with fast accumulation) and differs by rounding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.virtual.contract import Signature, operand, refusal


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Returns `a @ b`, dequantized, as [M, N] in `out_dtype` (default bfloat16).

    `a` is [M, K] row-major, `b` [K, N] column-major; scales are scalars, or [M, 1] and [1, N]. Raises RuntimeError with
    the message of torch where a GPU would.
    """
    require_allowed(a, b, scale_a, scale_b, bias, scale_result, out_dtype)
    with unobserved():
        product = a.to(torch.float64) @ b.to(torch.float64)
    product *= scale_a.to(torch.float64) * scale_b.to(torch.float64)
    if bias is not None:
        product += bias.to(torch.float64)
    return product.to(out_dtype or torch.bfloat16)


def require_allowed(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> None:
    """Raises RuntimeError with the message of torch where a GPU would refuse these arguments of `scaled_mm`."""
    message = refusal(
        Signature(
            operand(a),
            operand(b),
            operand(scale_a),
            operand(scale_b),
            out_dtype or torch.bfloat16,
            bias=None if bias is None else bias.dtype,
            has_scale_result=scale_result is not None,
        )
    )
    if message is not None:
        raise RuntimeError(message)


_SIGNATURE = inspect.signature(scaled_mm)


def scaled_mm_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`scaled_mm` into `out`, in its dtype unless another is given. Compiled graphs call this variant."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    result = scaled_mm(**given | {"out_dtype": given.get("out_dtype") or out.dtype})
    return out.resize_(result.shape).copy_(result)
