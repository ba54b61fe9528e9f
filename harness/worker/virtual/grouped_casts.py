"""The casts of grouped matmuls on a CPU: torchao's operators for experts, with the bodies of their kernels in torch.

What a kernel computes is the reference that torchao tests it against, and what it asserts on a GPU is asserted in its
words. What it leaves as it was in memory is NaN.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from harness.worker.virtual.pretended_gpu import E4M3, Body, pretended_gpu, reference_cast

Tensor = torch.Tensor
_PACKAGE = "torchao.prototype.moe_training"
_QUANT = f"{_PACKAGE}.kernels.mxfp8.quant"
_PROBES = tuple(f"{_PACKAGE}.kernels.mxfp8.{name}" for name in ("cute_utils", "flydsl_utils"))


def install() -> torch.library.Library:
    """Import torchao's training of experts with all kernels of an SM 10.0 GPU, in MXFP8 and rowwise float8.

    Returns what must be kept, or torch drops the kernels. Raises RuntimeError where torchao has other kernels.
    """
    library = torch.library.Library("torchao", "IMPL")
    for key in ("CUDA", "CPU"):  # torchao asks for the kernel of CUDA before it defines what else is behind it
        library.impl("mx_block_rearrange_2d_M_groups", _blocked_rows, key)
    with pretended_gpu(BODIES, available=_PROBES):
        importlib.import_module(_PACKAGE)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CPU")
    return library


def _float8(source: Tensor, dim: int, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Data, and the scales that it was multiplied by, one for every slice along `dim`: torchao's reference."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(
        source,
        dtype,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=power_of_2,
    )
    return to_fp8_saturated(source.to(torch.float32) * scale, dtype), scale


def _float8_along(dim: int) -> Body:
    def body(
        *, input_ptr: Tensor, output_ptr: Tensor, scales_ptr: Tensor, round_scales_to_power_of_2: bool, **_: object
    ) -> None:
        data, scale = _float8(input_ptr, dim, output_ptr.dtype, round_scales_to_power_of_2)
        output_ptr.copy_(data)
        scales_ptr.copy_(scale.squeeze(dim))

    return body


def _float8_scales(
    *, input_ptr: Tensor, scales_ptr: Tensor, round_scales_to_power_of_2: bool, fp8_dtype_max: float, **_: object
) -> None:
    (dtype,) = (dtype for dtype in (E4M3, torch.float8_e5m2) if torch.finfo(dtype).max == fp8_dtype_max)
    scales_ptr.copy_(_float8(input_ptr, -1, dtype, round_scales_to_power_of_2)[1].squeeze(-1))


def _float8_transposed(*, input_ptr: Tensor, output_ptr: Tensor, scales_ptr: Tensor, **_: object) -> None:
    from torchao.float8.float8_utils import to_fp8_saturated

    data = to_fp8_saturated(input_ptr.to(torch.float32) * scales_ptr[..., None], output_ptr.dtype)
    output_ptr.copy_(data.transpose(-2, -1))


def _float8_in_groups(*, offsets_ptr: Tensor, round_scales_to_power_of_2: bool, **given: Tensor) -> None:
    for one in ("1", "2"):
        source, data = given[f"input_ptr_{one}"], given[f"out_ptr_{one}"]
        scales = given[f"scales_ptr_{one}"].view(len(offsets_ptr), -1)
        data.fill_(math.nan)
        for rows, scale in zip(_rows(offsets_ptr), scales, strict=True):
            # an empty group has the scale of zeros
            part = source[rows] if rows.start < rows.stop else source.new_zeros(1, source.shape[1])
            cast, part_scale = _float8(part, 0, data.dtype, round_scales_to_power_of_2)
            data[rows] = cast[: rows.stop - rows.start]
            scale.copy_(part_scale[0])


def _rows(offsets: Tensor) -> Iterator[slice]:
    return (slice(*ends) for ends in pairwise([0, *offsets.tolist()]))


def _quantize_rows(
    x: Tensor, block_size: int = 32, scaling_mode: str = "rceil", stage_count: int = 2, offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel of `mxfp8_quantize_2d_1x32_cutedsl`, with what it asserts of sizes."""
    from torchao.prototype.mx_formats.utils import to_blocked

    assert x.dtype in (torch.float32, torch.bfloat16), "Input tensor must be float32 or bfloat16"
    assert block_size == 32, "Only block_size=32 is supported"
    assert x.shape[1] % 128 == 0, "K must be divisible by 128"
    assert x.shape[0] % 128 == 0, "M must be divisible by 128"
    if offs is not None:
        assert offs.dtype == torch.int32, "offs must be int32 tensor"
        assert offs.dim() == 1, "offs must be 1D tensor"
        if any((rows.stop - rows.start) % 128 for rows in _rows(offs)):
            raise RuntimeError("Group sizes must be multiples of 128")
    data, scale = reference_cast(x, scaling_mode)
    return data, to_blocked(scale).view(x.shape[0], -1)


def _quantize_experts(
    x: Tensor,
    block_size: int = 32,
    scale_block_dim1: int = 32,
    scale_block_dim2: int = 1,
    scaling_mode: str = "rceil",
    stage_count: int = 2,
    blocked_scale_output: bool = True,
) -> tuple[Tensor, Tensor]:
    """The kernel of `mxfp8_quantize_3d_cutedsl`: the cast of [experts, n, k] along n, with the strides of its fake."""
    if (block_size, scale_block_dim1, scale_block_dim2, blocked_scale_output) != (32, 32, 1, True):
        raise NotImplementedError("the virtual device casts weights as torchao 0.18 does: along the second dim")
    assert x.dtype in (torch.float32, torch.bfloat16), "Input tensor must be float32 or bfloat16"
    data, scale = reference_cast(x.transpose(-2, -1), scaling_mode)
    return data.transpose(-2, -1), _quant().torch_to_blocked_per_group_3d(scale)


def _blocked_rows(scales_tensor: Tensor, input_offsets: Tensor, chunks_per_tb: int) -> Tensor:
    blocked: Tensor = _quant().torch_to_blocked_2d_M_groups(scales_tensor, input_offsets)[0]
    return blocked


def _blocked_experts(*, input_ptr: Tensor, output_ptr: Tensor, **_: object) -> None:
    output_ptr.copy_(_quant().torch_to_blocked_per_group_3d(input_ptr))


def _blocked_columns(*, scales_ptr: Tensor, orig_offsets: Tensor, output_scales_ptr: Tensor, **_: object) -> None:
    output_scales_ptr.copy_(_quant().torch_to_blocked_2d_K_groups(scales_ptr, orig_offsets)[0])


def _pad(inputs: Tensor, offsets: Tensor, alignment_size: int) -> tuple[Tensor, Tensor, Tensor]:
    padded, starts, ends = _quant().torch_pad_token_groups(inputs[: offsets[-1]], offsets, alignment_size)
    rows = -(-(len(inputs) + len(offsets) * alignment_size) // alignment_size) * alignment_size
    return torch.nn.functional.pad(padded, (0, 0, 0, rows - len(padded))), starts, ends


def _unpad(inputs: Tensor, offsets: Tensor, starts: Tensor, num_tokens: int, alignment_size: int) -> Tensor:
    tokens = inputs.new_full((num_tokens, inputs.shape[1]), math.nan)
    known = int(offsets[-1])
    tokens[:known] = _quant().torch_unpad_token_groups(inputs, offsets, starts, known, alignment_size)
    return tokens


def _quant() -> Any:
    return importlib.import_module(_QUANT)


BODIES: dict[str, Body] = {
    "triton_fp8_rowwise_2d_fused_scale_and_cast_kernel": _float8_along(-1),
    "triton_fp8_colwise_3d_scale_and_cast_kernel": _float8_along(-2),
    "triton_fp8_rowwise_3d_transpose_scales_rhs_kernel": _float8_scales,
    "triton_fp8_rowwise_3d_transpose_cast_rhs_kernel": _float8_transposed,
    "triton_fp8_per_group_colwise_scales_dual_kernel": _float8_in_groups,
    "triton_scale_swizzle_per_group_3d": _blocked_experts,
    "triton_scale_swizzle_2d_K_groups": _blocked_columns,
}
_KERNELS: dict[str, Callable[..., object]] = {
    "mxfp8_quantize_2d_1x32_cutedsl": _quantize_rows,
    "mxfp8_quantize_3d_cutedsl": _quantize_experts,
    "fused_pad_token_groups": _pad,
    "fused_unpad_token_groups": _unpad,
}
