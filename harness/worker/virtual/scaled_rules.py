"""What CUDA refuses of `aten::_scaled_mm`, in its order and its words, and which blocks share a scale.

Source: `_scaled_mm_out_cuda`, `get_joint_scaling` and `_scaled_gemm` in aten/src/ATen/native/cuda/ScaledBlas.cpp, and
`check_inputs` in RowwiseScaledMM.cu beside it. What cuBLAS refuses behind them has no words of torch: it is refused by
name. `GPU.capability` is the GPU that is pretended; without one, whatever some GPU runs is run, in the layout of all.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from harness.matrix.recipes import MX, ROW, SLICE, SQUARE, TENSOR, Block


class Gpu:
    capability: tuple[int, int] | None = None


GPU = Gpu()


class Operand(NamedTuple):
    """The properties of a tensor that the checks read."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def t(self) -> "Operand":
        return Operand(self.shape[::-1], self.stride[::-1], self.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


class Signature(NamedTuple):
    """The arguments of one `_scaled_mm` call without their values."""

    a: Operand
    b: Operand
    scale_a: Operand
    scale_b: Operand
    out_dtype: torch.dtype
    bias: Operand | None
    scale_result: Operand | None


class Refusal(NamedTuple):
    text: str
    error: type[Exception] = RuntimeError


_PAIRS = ((TENSOR, TENSOR), (ROW, ROW), (SQUARE, SLICE), (SLICE, SQUARE), (SLICE, SLICE), (MX, MX))
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_HIGH = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = {
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
}


def name_of(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def _times(size: int, block: int) -> int:
    return -(-size // block)


def _mx_scales(rows: int, length: int) -> int:
    return _times(rows, 128) * 128 * _times(_times(length, 32), 4) * 4


def _is_scaled(by: Block, matrix: Operand, scale: Operand) -> bool:
    """`is_desired_scaling`."""
    if by == MX:
        fits = scale.numel == _mx_scales(*matrix.shape) and scale.is_contiguous
        return matrix.dtype in _FLOAT8 and scale.dtype == torch.float8_e8m0fnu and fits
    if matrix.dtype not in _FLOAT8 or scale.dtype != torch.float32:
        return False
    if by == TENSOR:
        return scale.numel == 1
    rows, blocks = matrix.shape[0], _times(matrix.shape[1], 128)
    if by == ROW:
        return scale.shape == (rows, 1) and scale.is_contiguous
    sizes, strides = ((rows, blocks), (1, rows)) if by == SLICE else ((_times(rows, 128), blocks), (blocks, 1))
    return scale.shape == sizes and all(
        size <= 1 or stride == wanted for size, stride, wanted in zip(sizes, scale.stride, strides, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def blocks_of(a: Operand, b: Operand, scale_a: Operand, scale_b: Operand) -> tuple[Block, Block] | None:
    """Return what shares a scale in `a` and in `b`: `get_joint_scaling`; None if CUDA knows none."""
    for of_a, of_b in _PAIRS:
        if _is_scaled(of_a, a, scale_a) and _is_scaled(of_b, b.t, scale_b if of_b == MX else scale_b.t):
            return of_a, of_b
    return None


@functools.lru_cache(maxsize=4096)
def refusal(given: Signature, capability: tuple[int, int] | None) -> Refusal | None:
    """Return what this GPU raises for a call; None if it would run."""
    return next(itertools.chain(_of_shapes(given, capability), _of_sizes(given), _of_kernels(given, capability)), None)


def _of_shapes(given: Signature, capability: tuple[int, int] | None) -> Iterator[Refusal]:
    a, b = given.a, given.b
    if capability is not None and capability < (8, 9):
        needed = "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm"
        yield Refusal(f"{needed} MI300+")
    for name, matrix in (("mat1", a), ("mat2", b)):
        if len(matrix.shape) != 2:
            yield Refusal(f"{name} must be a matrix")
    if a.shape[1] != b.shape[0]:
        (m, k), (k_of_b, n) = a.shape, b.shape
        yield Refusal(f"mat1 and mat2 shapes cannot be multiplied ({m}x{k} and {k_of_b}x{n})")
    if blocks_of(a, b, given.scale_a, given.scale_b) is None:
        yield Refusal(_no_scaling(given))


def _of_sizes(given: Signature) -> Iterator[Refusal]:
    (m, k), n = given.a.shape, given.b.shape[1]
    bias, scale = given.bias, given.scale_result
    if scale is not None and (scale.numel != 1 or scale.dtype != torch.float32):
        yield Refusal("scale_result must be a float scalar")
    if bias is not None and bias.numel != n:
        yield Refusal(f"Bias must be size {n} but got {bias.numel}")
    if k % 16:
        yield Refusal(f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({m}x{k}).")
    if n % 16:
        yield Refusal(f"mat2 shape ({k}x{n}) must be divisible by 16")
    if given.a.dtype == given.b.dtype == torch.float8_e5m2:
        yield Refusal("Multiplication of two Float8_e5m2 matrices is not supported", ValueError)
    if bias is not None and given.out_dtype != torch.float64:
        yield from _of_bias(bias.dtype, given.out_dtype)


def _no_scaling(given: Signature) -> str:
    (m, k), n = given.a.shape, given.b.shape[1]
    rows, slices, columns = _times(m, 128), _times(k, 128), _times(n, 128)
    fp4_a, fp4_b = (_times(side, 128) * 128 * _times(_times(2 * k, 16), 4) * 4 for side in (m, n))
    seen = [
        f"{name}.dtype()={name_of(matrix.dtype)}, scale_{name}.dtype()={name_of(scale.dtype)}, "
        f"scale_{name}.size()={[*scale.shape]}{joint}scale_{name}.stride()={[*scale.stride]}"
        for name, matrix, scale, joint in (("a", given.a, given.scale_a, ", "), ("b", given.b, given.scale_b, " and "))
    ]
    scales, both = "a and b should be float8, scales should be float", "and both should be"
    squares = f"({rows}, {slices}) and scale_b should be ({slices}, {columns}), {both}"
    of_mx = f"{_mx_scales(m, k)} elements and scale_b should have {_mx_scales(n, k)} elements"
    rows_of = f"scale_a should be ({m}, 1) and scale_b should be (1, {n}), {both}"
    lines = (
        "Invalid scaling configuration.",
        f"- For TensorWise scaling, {scales} and singletons.",
        f"- For RowWise scaling, {scales}, {rows_of} contiguous.",
        (
            f"- For BlockWise 1x128 scaling, {scales}, scale_a should be ({m}, {slices}) and scale_b should be "
            f"({slices}, {n}), {both} outer-dim-major."
        ),
        (
            f"- For BlockWise 128x128 scaling, {scales}, scale_a should be {squares} near-inner-dim-major "
            "(with 16-byte aligned strides)."
        ),
        f"- For Blockwise 1x32 scaling, {scales}8_e8m0fnu, scale_a should have {of_mx}, {both} contiguous.",
        (
            "- For Blockwise 1x16 scaling, a and b should be float4 (packed 2x), scales should be float8_e4m3fn, "
            f"scale_a should have {fp4_a} elements and scale_b should have {fp4_b} elements, {both} contiguous."
        ),
        f"Got {', '.join(seen)}",
    )
    return "\n".join(lines)


def _of_bias(bias: torch.dtype, out: torch.dtype) -> Iterator[Refusal]:
    if out == torch.float32:
        yield Refusal("Bias is not supported when out_dtype is set to Float32")
    if bias not in (torch.bfloat16, torch.float16):
        yield Refusal(f"Bias must be BFloat16 or Half, but got {name_of(bias)}")
    for dtype, word in ((torch.bfloat16, "BFloat16"), (torch.float16, "Float16")):
        if out == dtype != bias:
            yield Refusal(f"Bias must be {word} to compute {name_of(out)} output, but got {name_of(bias)}")


def _of_kernels(given: Signature, capability: tuple[int, int] | None) -> Iterator[Refusal]:
    """What the kernel of a scaling refuses, of this GPU with CUDA 12.9: for rows that of CUTLASS, but on SM 9.0."""
    a, b, out, major = given.a, given.b, given.out_dtype, (capability or (9, 0))[0]
    scaled = blocks_of(a, b, given.scale_a, given.scale_b)
    laid_out = (a.stride[1] == 1 and b.stride[0] == 1) or 0 in (*a.shape, *b.shape)
    assert scaled is not None
    if scaled == (ROW, ROW) and major != 9:
        yield from _of_cutlass(b.dtype, out, laid_out=laid_out)
    elif not laid_out and major == 9:
        yield Refusal("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
    if capability is not None and {MX: 10, SLICE: 9, SQUARE: 9}.get(scaled[0], major) != major:
        name = "x".join(map(str, scaled[0]))
        yield Refusal(f"scales of {name} values: cuBLAS has no kernel for SM {major}.{capability[1]}")
    if out in _FLOAT8 and (scaled != (TENSOR, TENSOR) or out not in (a.dtype, b.dtype)):
        yield Refusal(f"out_dtype {out}: the virtual device has it for scales of tensors, in the dtype of an operand")
    if out not in (*_HIGH, *_FLOAT8, torch.float64):
        yield Refusal(f"out_dtype {out} is not supported by the virtual device")


def _of_cutlass(dtype_of_b: torch.dtype, out: torch.dtype, *, laid_out: bool) -> Iterator[Refusal]:
    if out not in (*_HIGH, torch.float64):
        kinds = "Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling."
        yield Refusal(kinds, ValueError)
    if dtype_of_b != torch.float8_e4m3fn:
        yield Refusal("Expected b.dtype() == at::kFloat8_e4m3fn to be true, but got false.")
    if not laid_out:
        yield Refusal("Expected a.stride(1) == 1 and b.stride(0) == 1 to be true, but got false.")
