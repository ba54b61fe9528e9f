"""What CUDA refuses of `aten::_scaled_grouped_mm`, in its order and its words.

Source: aten/src/ATen/native/cuda/GroupedBlas.cpp, and GroupedMMUtils.h beside it. Without a GPU that is pretended,
whatever some GPU runs is run.
"""

from collections.abc import Iterator

import torch

from harness.worker.virtual.scaled_rules import Operand, Refusal, name_of

E8M0 = torch.float8_e8m0fnu
_TILE = 128


def refusals(
    given: tuple[Operand | None, ...], out_dtype: torch.dtype | None, capability: tuple[int, int] | None
) -> Iterator[Refusal]:
    """Yield what this GPU raises for `a, b, scale_a, scale_b, offs, bias, scale_result`: the first is raised."""
    a, b, scale_a, scale_b, offs, bias, scale_result = given
    assert a is not None and b is not None and scale_a is not None and scale_b is not None
    if capability is not None and capability[0] not in (9, 10):
        cards = "CUDA devices with compute capability = [9.0, 10.0], or ROCm MI300+"
        yield Refusal(f"torch._scaled_grouped_mm is only supported on {cards}", ValueError)
    yield from _of_layout(a, "mat1", transposed=False)
    yield from _of_layout(b, "mat2", transposed=True)
    yield from _of_sizes(a, b)
    if bias is not None:
        yield Refusal("Bias not supported yet", ValueError)
    if scale_result is not None:
        yield Refusal("Scale result not supported yet", ValueError)
    flat = len(a.shape) == 2 or len(b.shape) == 2
    if (offs is not None) != flat:
        yield Refusal("Have to provide offsets if there is a 2d matrix", ValueError)
    if offs is not None and len(offs.shape) != 1:
        yield Refusal("offs has to be 1D", ValueError)
    if offs is not None and offs.dtype != torch.int32:
        yield Refusal("Offsets have to be int32", ValueError)
    if (scale_a.dtype, scale_b.dtype) not in ((torch.float32,) * 2, (E8M0,) * 2):
        both = "For FP8 tensorwise and rowwise, both scales must both be float32 tensors."
        yield Refusal(f"{both} For MXFP8, scales must both be float8_e8m0fnu tensors.", ValueError)
    of_scale = _of_rows if scale_a.dtype == torch.float32 else _of_blocks
    times = offs.shape[0] if offs is not None and len(a.shape) == len(b.shape) == 2 else 1
    yield from of_scale(a, scale_a, 0, times)
    yield from of_scale(b, scale_b, 1, times)
    if out_dtype not in (None, torch.bfloat16):
        yield Refusal("Only bf16 high precision output types are supported for grouped gemm", ValueError)
    yield from _of_groups(a, b, offs)
    yield from _of_kernels(a, b, scale_a, capability)


def _of_layout(matrix: Operand, name: str, *, transposed: bool) -> Iterator[Refusal]:
    (rows, columns), (of_row, of_column) = matrix.shape[-2:], matrix.stride[-2:]
    is_transposed = of_row == 1 and of_column >= max(1, rows)
    if not is_transposed and not (of_column == 1 and of_row >= max(1, columns)):
        seen = f"got {[*matrix.stride]} for strides and {[*matrix.shape]} for sizes"
        yield Refusal(f"Invalid strides/sizes, {seen}")
    if (of_column if is_transposed else of_row) % (16 // matrix.dtype.itemsize):
        yield Refusal("strides should be multiple of 16 bytes")
    if is_transposed != transposed:
        yield Refusal(f"Expected {name} to {'' if transposed else 'not '}be transposed", ValueError)


def _of_sizes(a: Operand, b: Operand) -> Iterator[Refusal]:
    for name, matrix in (("mat_a", a), ("mat_b", b)):
        if len(matrix.shape) not in (2, 3):
            yield Refusal(f"{name} has to be 2 or 3d", ValueError)
    if not len(a.shape) == len(b.shape) == 2 and a.shape[-1] != b.shape[-2]:
        yield Refusal("contraction dimension of mat_a and mat_b must match", ValueError)
    if a.shape[-1] % 16:
        shape = f"but got mat1 shape: ({[*a.shape]})."
        yield Refusal(f"Expected trailing dimension of mat_a to be divisible by 16 {shape}", ValueError)
    if b.shape[-2] % 16 or b.shape[-1] % 16:
        yield Refusal(f"Expected mat_b shape to be divisible by 16 but got mat_b shape: ({[*b.shape]}).", ValueError)


def _of_rows(matrix: Operand, scale: Operand, number: int, times: int) -> Iterator[Refusal]:
    """`_check_scales_fp8_rowwise`."""
    if len(matrix.shape) == 2:
        if len(scale.shape) != 1:
            yield Refusal(f"scale must be a 1D tensor, but got {len(scale.shape)}D, arg {number}")
        if not scale.is_contiguous:
            yield Refusal(f"scale must be contiguous for arg {number}")
        if scale.shape[0] != matrix.shape[number] * times:
            yield Refusal(f"scale must have the same length as mat for arg {number}")
        return
    if len(scale.shape) != 2:
        yield Refusal(f"scale must be a 2D tensor, but got {len(scale.shape)}D for arg {number}")
    if scale.stride[1] != 1:
        yield Refusal(f"scale must be contiguous in the last dimension for arg {number}")
    if scale.shape[0] != matrix.shape[0]:
        yield Refusal(f"scale must have the same batch dimension as mat for arg {number}")
    if scale.shape[1] != matrix.shape[1 + number]:
        yield Refusal(f"scale must have the same first dimension as mat for arg {number}")


def _of_blocks(matrix: Operand, scale: Operand, number: int, times: int) -> Iterator[Refusal]:
    """`_check_scales_blocked`."""
    if len(matrix.shape) == 2:
        if len(scale.shape) != 2:
            dims = f"but got mat.dim() = 2 and scale.dim() = {len(scale.shape)} for arg {number}"
            yield Refusal(f"for block-scaled, scale must have same number of dimensions as parent tensor, {dims}")
        rows, shape = matrix.shape[number], ", ".join(map(str, scale.shape))
        if scale.shape[0] < rows:
            tensor = f"arg {number} tensor shape ({', '.join(map(str, matrix.shape))})"
            wanted = f"must have scale.shape[0] >= {rows} but got scale.shape=({shape})"
            yield Refusal(f"for block-scaled, {tensor} {wanted}")
        return
    groups, length, columns = matrix.shape
    blocks, padded = -(-(length // 32) // 4) * 4, -(-columns // _TILE) * _TILE
    if len(scale.shape) != 2:
        wanted = "must have a 2d scale of shape (G, blocked_scale_K * blocked_scale_N),"
        seen = f"but scale is {len(scale.shape)}D for arg {number}"
        yield Refusal(f"for block-scaled 2d-3d grouped GEMM, the 3d tensor of shape (G,K,N) {wanted}{seen}")
    if scale.shape != (groups, blocks * padded):
        tensor = f"the tensor shape ({groups}, {length}, {columns})"
        wanted = f"must have scale shape ({groups},{blocks},{padded}) for arg {number}"
        got = ", ".join(map(str, scale.shape))
        yield Refusal(f"for block-scaled grouped GEMM, {tensor} {wanted}, got: {got}")


def _of_groups(a: Operand, b: Operand, offs: Operand | None) -> Iterator[Refusal]:
    """`create_grouped_gemm_output_tensor`."""
    whole = a if len(b.shape) == 2 else b
    if offs is None and a.shape[0] != b.shape[0]:
        yield Refusal("batched dimension has to match")
    elif offs is not None and len(whole.shape) == 3 and offs.shape[0] != whole.shape[0]:
        yield Refusal("matrix batch sizes have to match")


def _of_kernels(a: Operand, b: Operand, scale: Operand, capability: tuple[int, int] | None) -> Iterator[Refusal]:
    if scale.dtype == E8M0 and len(a.shape) == 3:
        yield Refusal("MXFP8 grouped GEMM currently only supports 2d-2d and 2d-3d cases", ValueError)
    if scale.dtype == E8M0 and capability not in (None, (10, 0)):
        yield Refusal(f"scales of 32 values: the grouped kernel is one of SM 10.0, not of {capability}")
    for matrix in (a, b):
        if matrix.dtype != torch.float8_e4m3fn:
            yield Refusal(f"Expected mat_a to be Float8_e4m3 matrix got {name_of(matrix.dtype)}", ValueError)
