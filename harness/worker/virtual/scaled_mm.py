"""`aten::_scaled_mm` for the CPU: the arithmetic of the CUDA kernel, under the CUDA contract, at a usable speed.

FP8 values are multiplied and summed in float64. Products of two e4m3 values and sums of thousands of them are exact
there, so the result does not depend on the order of summation: it is the same for every thread count, CPU and shard
of the free dimensions, and is rounded once to the output dtype. A GPU accumulates in float32 (or less with fast
accumulation) and differs from this by rounding only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from harness.worker.virtual.contract import Signature, operand, refusal

ScaledMMObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Called with (a, b, scale_a, scale_b) on every call, before the arithmetic. Probes subscribe; they must not write.
observers: list[ScaledMMObserver] = []


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Around what the harness itself multiplies to measure a run: it is no matmul of the target."""
    before = observers[:]
    observers.clear()
    try:
        yield
    finally:
        observers.extend(before)


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
    """`a @ b` dequantized: a [M, K] row-major, b [K, N] column-major, scales scalar or [M, 1] and [1, N].

    Returns [M, N] in `out_dtype` (default bfloat16). Raises RuntimeError with torch's own message where a GPU would.
    """
    dtype = out_dtype or torch.bfloat16
    message = refusal(
        Signature(
            operand(a),
            operand(b),
            operand(scale_a),
            operand(scale_b),
            dtype,
            has_bias=bias is not None,
            has_scale_result=scale_result is not None,
        )
    )
    if message is not None:
        raise RuntimeError(message)
    for observe in observers:
        observe(a, b, scale_a, scale_b)
    product = a.to(torch.float64) @ b.to(torch.float64)
    product *= scale_a.to(torch.float64) * scale_b.to(torch.float64)
    if bias is not None:
        product += bias.to(torch.float64)
    return product.to(dtype)


def scaled_mm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same, written into `out`, which compiled graphs allocate."""
    result = scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype, use_fast_accum)
    return out.resize_(result.shape).copy_(result)
