"""The argument checks of `torch._scaled_mm` on CUDA: rejects what a GPU would reject, with the same message.

Most rules come from torch's meta registration, which checks meta tensors as if for CUDA. Two exist in the CUDA kernel
only: e5m2 x e5m2 is not supported, and rowwise scaling writes bfloat16 only
(aten/src/ATen/native/cuda/ScaledBlas.cpp). Results are cached by signature, as a run uses few of them.

One exception: float64 outputs are allowed, though no GPU supports them, for cases of dtype float64.

Not modelled: 16-byte alignment of data pointers, and the reduced precision of fast accumulation.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Operand(NamedTuple):
    """The properties of a tensor that the checks read."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Signature(NamedTuple):
    """The arguments of one `_scaled_mm` call without their values."""

    a: Operand
    b: Operand
    scale_a: Operand
    scale_b: Operand
    out_dtype: torch.dtype
    bias: torch.dtype | None
    has_scale_result: bool


def operand(tensor: torch.Tensor) -> Operand:
    """The properties of `tensor` that the checks read."""
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@functools.lru_cache(maxsize=4096)
def refusal(signature: Signature) -> str | None:
    """The error message of a GPU (sm89 or later) for this call; None if it would run."""
    meta_a, meta_b, meta_scale_a, meta_scale_b = (
        torch.empty_strided(op.shape, op.stride, dtype=op.dtype, device="meta")
        for op in (signature.a, signature.b, signature.scale_a, signature.scale_b)
    )
    try:
        torch.ops.aten._scaled_mm.default(
            meta_a, meta_b, meta_scale_a, meta_scale_b, None, None, signature.out_dtype, False
        )
    except (RuntimeError, ValueError) as error:
        return str(error)
    return _kernel_refusal(signature)


def _kernel_refusal(signature: Signature) -> str | None:
    if signature.a.dtype == signature.b.dtype == torch.float8_e5m2:
        return "Multiplication of two Float8_e5m2 matrices is not supported"
    if signature.out_dtype == torch.float64:
        return None  # for cases of dtype float64, see above
    return _output_refusal(signature)


def _output_refusal(signature: Signature) -> str | None:
    rowwise = len(signature.scale_a.shape) == 2 and signature.scale_a.shape[0] > 1
    if rowwise and signature.out_dtype != torch.bfloat16:
        return f"Only bf16 high precision output types are supported for row-wise scaling, got {signature.out_dtype}"
    if signature.out_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"out_dtype {signature.out_dtype} is not supported by the virtual device"
    if signature.bias is not None and signature.out_dtype == torch.float32:
        return "Bias is not supported when out_dtype is set to Float32"
    if signature.bias not in (None, signature.out_dtype):
        return f"Bias must be {signature.out_dtype} to compute {signature.out_dtype} output, but got {signature.bias}"
    if signature.has_scale_result:
        return "scale_result is only for float8 outputs, which the virtual device does not model"
    return None
