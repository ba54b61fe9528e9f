"""The exact `aten::_scaled_mm`, for any device: the values and argument checks of the CUDA kernel, and usably fast.

Multiplies and accumulates in float64, where products of e4m3 values and sums of thousands of them are exact. So the
result does not depend on the order of summation, the number of threads, the CPU, or the sharding of M and N, and is
rounded once, to the output dtype. A GPU accumulates in float32 (less with fast accumulation) and differs by rounding.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import ScalingType, SwizzleType

from harness.matrix.recipes import BLOCK
from harness.worker.dispatch_hooks.hook import unobserved


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
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@functools.lru_cache(maxsize=4096)
def refusal(signature: Signature) -> str | None:
    """Return the error message of a GPU (sm89 or later) for this call; None if it would run."""
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
    if scale_a.dtype == torch.float8_e8m0fnu:
        product = block_product(a, b, scale_a, scale_b)
    else:
        with unobserved():
            product = a.to(torch.float64) @ b.to(torch.float64)
        product *= scale_a.to(torch.float64) * scale_b.to(torch.float64)
    if bias is not None:
        product += bias.to(torch.float64)
    return product.to(out_dtype or torch.bfloat16)


def block_product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in float64, where 32 values along K share a scale; scales as the hardware reads them, see `unswizzled`.

    Products of blocks are exact, and added in the order of K whatever the sharding of M and N.
    """
    of_a, of_b = (scale.to(torch.float64) for scale in unswizzled_scales(a, b, scale_a, scale_b))
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    with unobserved():
        for block in range(a.shape[1] // BLOCK):
            inner = slice(block * BLOCK, (block + 1) * BLOCK)
            product = a[:, inner].to(torch.float64) @ b[inner].to(torch.float64)
            total += product * (of_a[:, block, None] * of_b[None, :, block])
    return total


def unswizzled_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales [rows of a, blocks] and [columns of b, blocks] of a matmul in MXFP8."""
    blocks = a.shape[1] // BLOCK
    return unswizzled(scale_a, a.shape[0], blocks), unswizzled(scale_b, b.shape[1], blocks)


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The scales [rows, blocks] of what the hardware reads: tiles of 128 rows by 4 blocks, each as 32 x 16 (32_4_4).

    Source: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    tiles = scale.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 4 * -(-blocks // 4))[:rows, :blocks]


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


def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`scaled_mm` as `torch.nn.functional.scaled_mm` calls it, which names the recipe and the order of scales.

    Knows one scale for the tensor, for each row, and for each 32 values. Raises NotImplementedError for other recipes,
    ValueError with the message of the CUDA kernel for scales of blocks in another order than 32_4_4, and RuntimeError
    as `scaled_mm` does. Source: `_scaled_mxfp8_mxfp8` in aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    recipes = {*recipe_a, *recipe_b}
    if len(recipes) > 1 or not recipes <= _RECIPES or len(scale_a) != 1 or len(scale_b) != 1:
        message = f"scaling {[*recipe_a]} x {[*recipe_b]}: the virtual device has TensorWise, RowWise and BlockWise1x32"
        raise NotImplementedError(message)
    if recipes == {ScalingType.BlockWise1x32.value}:
        require_swizzled(*swizzle_a, *swizzle_b)
    meta = [tensor.to("meta") for tensor in (a, b, scale_a[0], scale_b[0])]
    torch.ops.aten._scaled_mm_v2.default(
        *meta[:2], meta[2:3], recipe_a, swizzle_a, meta[3:], recipe_b, swizzle_b, None, out_dtype
    )
    return scaled_mm(a, b, scale_a[0], scale_b[0], bias, out_dtype=out_dtype or a.dtype)


def require_swizzled(a: SwizzleType | int, b: SwizzleType | int) -> None:
    """Raises ValueError with the message of a GPU where scales of blocks are in another order than 32_4_4."""
    for name, swizzle in (("a", a), ("b", b)):
        if SwizzleType(swizzle) != SwizzleType.SWIZZLE_32_4_4:
            raise ValueError(f"scale_{name} must be swizzled to SWIZZLE_32_4_4 format")


_RECIPES = {ScalingType.TensorWise.value, ScalingType.RowWise.value, ScalingType.BlockWise1x32.value}


def into(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The kernel that writes to `out`, in its dtype unless another is given. Compiled graphs call this variant."""
    signature = inspect.signature(kernel)

    def with_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        result = kernel(**given | {"out_dtype": given.get("out_dtype") or out.dtype})
        return out.resize_(result.shape).copy_(result)

    return with_out
