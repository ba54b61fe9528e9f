"""The exact `aten::_scaled_mm`, for any device: the values and argument checks of the CUDA kernel, and usably fast.

Multiplies and accumulates in float64, where products of e4m3 values and sums of thousands of them are exact. So the
result does not depend on the order of summation, the number of threads, the CPU, or the sharding of M and N, and is
rounded once, to the output dtype. A GPU accumulates in float32 (less with fast accumulation) and differs by rounding.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType

from harness.matrix.recipes import MX, SLICE
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.virtual.scaled_rules import GPU, Operand, Signature, blocks_of, refusal


def operand(tensor: torch.Tensor) -> Operand:
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


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
    """Return `a @ b`, dequantized, as [M, N] in `out_dtype` (default: the dtype of `a`, as on a GPU).

    `a` is [M, K] row-major, `b` [K, N] column-major; scales are those that `blocks_of` knows. A float8 result is
    multiplied by `scale_result` and saturates. Raises what a GPU raises, see `scaled_rules`.
    """
    require_allowed(a, b, scale_a, scale_b, bias, scale_result, out_dtype)
    blocks = blocks_of(*map(operand, (a, b, scale_a, scale_b)))
    if blocks == (MX, MX):
        product = block_product(a, b, scale_a, scale_b)
    elif blocks is not None and SLICE in blocks:
        given = zip((scale_a, scale_b.t()), blocks, strict=True)
        of_a, of_b = (scale.repeat_interleave(rows, 0) for scale, (rows, _) in given)
        product = product_of_blocks(a, b, of_a, of_b, SLICE[1])
    else:
        with unobserved():
            product = a.to(torch.float64) @ b.to(torch.float64)
        product *= scale_a.to(torch.float64) * scale_b.to(torch.float64)
    if bias is not None:
        product += bias.to(torch.float64)
    return _rounded(product, out_dtype or a.dtype, scale_result)


def _rounded(product: torch.Tensor, dtype: torch.dtype, scale_result: torch.Tensor | None) -> torch.Tensor:
    if dtype.itemsize > 1:
        return product.to(dtype)
    if scale_result is not None:
        product *= scale_result.to(torch.float64)
    largest = torch.finfo(dtype).max
    return product.clamp(-largest, largest).to(dtype)


def block_product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in float64, where 32 values along K share a scale, as the hardware reads it: see `unswizzled`."""
    return product_of_blocks(a, b, *scales_of_blocks(a, b, scale_a, scale_b), MX[1])


def product_of_blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, length: int
) -> torch.Tensor:
    """`a @ b` in float64, with scales [rows of a or more, blocks of `length`] and [columns of b or more, blocks].

    Products of blocks are exact, and added in the order of K whatever the sharding of M and N.
    """
    of_a, of_b = scale_a[: a.shape[0]].to(torch.float64), scale_b[: b.shape[1]].to(torch.float64)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    with unobserved():
        for block in range(-(-a.shape[1] // length)):
            inner = slice(block * length, (block + 1) * length)
            product = a[:, inner].to(torch.float64) @ b[inner].to(torch.float64)
            total += product * (of_a[:, block, None] * of_b[None, :, block])
    return total


def scales_of_blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales [rows of a, blocks] and [columns of b, blocks] that a matmul was given, or of 128 rows each."""
    sides, k = ((scale_a, a.shape[0]), (scale_b, b.shape[1])), a.shape[1]
    if scale_a.dtype == torch.float8_e8m0fnu:
        of_a, of_b = (unswizzled(scale, rows, k // MX[1]) for scale, rows in sides)
    else:  # as the second version takes them
        of_a, of_b = (scale if len(scale) == rows else scale[: -(-k // SLICE[1])].t() for scale, rows in sides)
    return of_a, of_b


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return the scales [rows, blocks] from the hardware's layout: tiles of 128 rows by 4 blocks, as 32 x 16 (32_4_4).

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
    """Raise what a GPU raises for these arguments of `scaled_mm`."""
    of_a, of_b, of_scale_a, of_scale_b = map(operand, (a, b, scale_a, scale_b))
    of_bias, of_result = (None if tensor is None else operand(tensor) for tensor in (bias, scale_result))
    given = Signature(of_a, of_b, of_scale_a, of_scale_b, out_dtype or a.dtype, of_bias, of_result)
    refused = refusal(given, GPU.capability)
    if refused is not None:
        raise refused.error(refused.text)


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

    Knows the scalings of the first one. Raises NotImplementedError for others, ValueError with the message of the CUDA
    kernel for scales of blocks in another order than 32_4_4, and what `scaled_mm` raises. Source: `_scaled_mxfp8_mxfp8`
    and `_scaled_block*` in aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    recipes = *recipe_a, *recipe_b
    if len(scale_a) != 1 or len(scale_b) != 1 or recipes not in _RECIPES:
        message = f"scaling {[*recipe_a]} x {[*recipe_b]}: the virtual device has float8 scaling only"
        raise NotImplementedError(message)
    if _SLICE in recipes:
        if GPU.capability is not None and GPU.capability[0] != 9:
            raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")
        of_a = _as_first(a, scale_a[0], recipe_a[0], "a")
        of_b = _as_first(b.t(), scale_b[0], recipe_b[0], "b").t()
        return scaled_mm(a, b, of_a, of_b, bias, out_dtype=out_dtype or a.dtype)
    if recipes == (_MX, _MX):
        require_swizzled(*swizzle_a, *swizzle_b)
    meta = [tensor.to("meta") for tensor in (a, b, scale_a[0], scale_b[0])]
    torch.ops.aten._scaled_mm_v2.default(
        *meta[:2], meta[2:3], recipe_a, swizzle_a, meta[3:], recipe_b, swizzle_b, None, out_dtype
    )
    return scaled_mm(a, b, scale_a[0], scale_b[0], bias, out_dtype=out_dtype or a.dtype)


def _as_first(matrix: torch.Tensor, scale: torch.Tensor, recipe: int, name: str) -> torch.Tensor:
    """Return the scales of blocks of a matrix [rows, K] as the first version takes them.

    Those of 128 x 128 come as [blocks of K, padded to four; blocks of rows].
    """
    rows, blocks = matrix.shape[0], -(-matrix.shape[1] // 128)
    shape = (rows, blocks) if recipe == _SLICE else (-(-blocks // 4) * 4, -(-rows // 128))
    if scale.shape != shape or scale.dtype != torch.float32:
        raise ValueError(f"scale_{name} must have shape {shape[0]} x {shape[1]} Float elements, got {[*scale.shape]}")
    if scale.stride(0) != 1 or scale.stride(1) not in ((shape[0],) if shape[1] > 1 else (1, shape[0])):
        raise ValueError(f"scale_{name} must have strides (1, {shape[0]}); got {[*scale.stride()]}")
    return scale if recipe == _SLICE else scale[:blocks].t().contiguous()


def require_swizzled(a: SwizzleType | int, b: SwizzleType | int) -> None:
    """Raise ValueError with the message of a GPU where scales of blocks are in another order than 32_4_4."""
    for name, swizzle in (("a", a), ("b", b)):
        if SwizzleType(swizzle) != SwizzleType.SWIZZLE_32_4_4:
            raise ValueError(f"scale_{name} must be swizzled to SWIZZLE_32_4_4 format")


_TENSOR, _ROW, _MX = ScalingType.TensorWise.value, ScalingType.RowWise.value, ScalingType.BlockWise1x32.value
_SLICE, _SQUARE = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
_RECIPES = {(_TENSOR, _TENSOR), (_ROW, _ROW), (_MX, _MX), (_SLICE, _SLICE), (_SLICE, _SQUARE), (_SQUARE, _SLICE)}


def into(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the kernel that writes to `out`, in its dtype unless another is given. Compiled graphs call it."""
    signature = inspect.signature(kernel)

    def with_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        result = kernel(**given | {"out_dtype": given.get("out_dtype") or out.dtype})
        return out.resize_(result.shape).copy_(result)

    return with_out
