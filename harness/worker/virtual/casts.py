"""The casts of blocks of a GPU on a CPU: torchao's own operators, with the bodies of their kernels in torch.

torchao defines these operators, their fake kernels and their sharding rules where it finds such a GPU. It is imported
as if there were one: sizes, dtypes, strides, assertions and placements are torchao's. What the kernels compute is its
reference cast, to which its tests hold them bit for bit. What a kernel asserts on a GPU is asserted in its words, and
what it leaves as it was in memory is NaN.
"""

import builtins
import contextlib
import importlib
import inspect
import math
import pkgutil
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from harness.matrix.recipes import SLICE, SQUARE, Block
from harness.worker.process.process import PROCESS

Body = Callable[..., None]
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


def reference_cast(source: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of torchao's reference cast, one scale for 32 values of the last dim."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, data = to_mx(source.contiguous(), E4M3, 32, ScaleCalculationMode(mode))
    return data, scale


@contextlib.contextmanager
def pretended_gpu(bodies: Mapping[str, Body], *, available: Collection[str] = ()) -> Iterator[None]:
    """What torchao asks before it defines its kernels. A body gets the arguments of the Triton kernel of its name,
    without underscores in front.

    `available`: modules that only tell whether other compilers are installed; all of them seem to be. Raises
    RuntimeError at the end where a body has no kernel.
    """
    unused = dict(bodies)
    stock = {name: pkgutil.resolve_name(name) for name in _PRETENDED}
    stand_in = _triton(unused) | {name: _Available(name) for name in available}
    before = dict(sys.modules)
    with contextlib.ExitStack() as pretending:
        for name, value in _PRETENDED.items():
            pretending.enter_context(mock.patch(name, value))
        pretending.enter_context(mock.patch("builtins.__import__", _without_triton(builtins.__import__)))
        sys.modules.update(stand_in)
        try:
            yield
        finally:
            for name in stand_in:
                if name in before:
                    sys.modules[name] = before[name]
                else:
                    del sys.modules[name]
    _restore(sys.modules.keys() - before.keys(), stock)
    for name in unused:
        raise RuntimeError(f"torchao has no kernel {name}: the virtual device knows the kernels of torchao 0.18.")


def _without_triton(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `__import__`: torch finds no Triton. It looks once in a process, and would keep the stand-in."""

    def load_for(name: str, *given: Any, **named: Any) -> Any:
        importing = (given[0] if given else named.get("globals")) or {}
        if name.partition(".")[0] == "triton" and str(importing.get("__name__")).startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *given, **named)

    return load_for


def _restore(imported: Collection[str], stock: Mapping[str, object]) -> None:
    """Take back what modules of torch have bound that were first imported meanwhile. Those of torchao need it."""
    for module in (sys.modules[name] for name in imported if name.startswith("torch.")):
        for name, value in stock.items():
            word = name.rpartition(".")[2]
            if vars(module).get(word) is _PRETENDED[name]:
                setattr(module, word, value)


class _Available(types.ModuleType):
    """`_x_available()` is true, and `_missing_x()` empty."""

    def __getattr__(self, name: str) -> Callable[[], object]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: [] if "missing" in name else True


class _Language(types.ModuleType):
    """`triton.language`: dtypes are their names."""

    constexpr = bool

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _triton(unused: dict[str, Body]) -> dict[str, types.ModuleType]:
    triton: Any = types.ModuleType("triton")
    triton.language = _Language("triton.language")
    triton.jit = lambda kernel: _Kernel(kernel, unused.pop(kernel.__name__.lstrip("_"), None))
    triton.autotune = lambda **_: lambda kernel: kernel
    triton.Config = lambda kwargs, **_: types.SimpleNamespace(kwargs=kwargs)
    triton.cdiv = lambda a, b: -(-a // b)
    return {module.__name__: module for module in (triton, triton.language)}


def operator_of_triton(name: str, **_: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton_op`: an operator whose fake kernel is its own code, which launches nothing for fake tensors."""

    def decorate(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(function)
        return operator

    return decorate


class _Kernel:
    """`kernel[grid](...)`: runs the body once, for all of the grid, with the arguments by name."""

    def __init__(self, kernel: Callable[..., object], body: Body | None) -> None:
        self._name, self._signature, self._body = kernel.__name__, inspect.signature(kernel), body

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        if any_is_fake(*args, *named.values()):
            return
        if self._body is None:
            raise NotImplementedError(f"the virtual device has no body for the kernel {self._name} of torchao")
        self._body(**self._signature.bind_partial(*args, **named).arguments)


def any_is_fake(*values: object) -> bool:
    """Return whether a kernel has nothing to compute."""
    from torch._subclasses.fake_tensor import is_fake

    return any(is_fake(value) for value in values if isinstance(value, torch.Tensor))


def _yes(*_: object) -> bool:
    return True


_PRETENDED: Mapping[str, object] = {
    "torch.cuda.is_available": _yes,
    "torch.cuda.get_device_capability": lambda *_: (10, 0),
    "torch.utils._triton.has_triton": _yes,
    "torchao.utils.is_sm_at_least_90": _yes,
    "torchao.utils.is_sm_at_least_100": _yes,
    "torchao.utils.is_cuda_version_at_least": _yes,
    "torch.library.triton_op": operator_of_triton,
    "torch.library.wrap_triton": lambda kernel: kernel,
}


Tensor = torch.Tensor
PACKAGE = "torchao.prototype.moe_training"
_QUANT = f"{PACKAGE}.kernels.mxfp8.quant"
CUTE_PROBE = f"{PACKAGE}.kernels.mxfp8.cute_utils"
PROBES = (CUTE_PROBE, f"{PACKAGE}.kernels.mxfp8.flydsl_utils")


def install_for_experts() -> torch.library.Library:
    """Import torchao's training of experts with all kernels of an SM 10.0 GPU, in MXFP8 and rowwise float8.

    Returns what must be kept, or torch drops the kernels. Raises RuntimeError where torchao has other kernels.
    """
    library = bodies_of_cuda()
    with pretended_gpu(EXPERT_BODIES, available=PROBES):
        importlib.import_module(PACKAGE)
    return library


def bodies_of_cuda() -> torch.library.Library:
    """Give a CPU what torchao has for CUDA alone, before it is imported; return what must be kept."""
    library = torch.library.Library("torchao", "IMPL")
    library.impl("mx_block_rearrange_2d_M_groups", _blocked_rows, "CUDA")  # torchao looks for this one
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


def _require_sizes(x: Tensor, block_size: int, offs: Tensor | None) -> None:
    """Raise what the kernels of CuTe assert."""
    assert x.dtype in (torch.float32, torch.bfloat16), "Input tensor must be float32 or bfloat16"
    assert block_size == 32, "Only block_size=32 is supported"
    assert x.shape[1] % 128 == 0, "K must be divisible by 128"
    assert x.shape[0] % 128 == 0, "M must be divisible by 128"
    if offs is not None:
        assert offs.dtype == torch.int32, "offs must be int32 tensor"
        assert offs.dim() == 1, "offs must be 1D tensor"
        if any((rows.stop - rows.start) % 128 for rows in _rows(offs)):
            raise RuntimeError("Group sizes must be multiples of 128")


def _quantize_rows(
    x: Tensor, block_size: int = 32, scaling_mode: str = "rceil", stage_count: int = 2, offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the kernel of `mxfp8_quantize_2d_1x32_cutedsl`, with what it asserts of sizes."""
    from torchao.prototype.mx_formats.utils import to_blocked

    _require_sizes(x, block_size, offs)
    data, scale = reference_cast(x, scaling_mode)
    return data, to_blocked(scale).view(x.shape[0], -1)


def _quantize_columns_in_blocks(
    x: Tensor,
    block_size: int = 32,
    scaling_mode: str = "rceil",
    stage_count: int = 2,
    blocked_scale_output: bool = True,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the kernel of `mxfp8_quantize_2d_32x1_cutedsl`: the cast along the first dim, with data row by row."""
    from torchao.prototype.mx_formats.utils import to_blocked

    _require_sizes(x, block_size, offs)
    data, scale = reference_cast(x.t(), scaling_mode)
    return data.t().contiguous(), to_blocked(scale) if blocked_scale_output else scale


def _quantize_experts(x: Tensor, block_size: int = 32, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the kernel of `mxfp8_quantize_3d_cutedsl`, which torchao has a reference of."""
    assert x.dtype in (torch.float32, torch.bfloat16), "Input tensor must be float32 or bfloat16"
    names = ("scale_block_dim1", "scale_block_dim2", "scaling_mode", "stage_count", "blocked_scale_output")
    asked = dict(zip(names, (32, 1, "rceil", 2, True), strict=True)) | dict(zip(names, given, strict=False))
    del asked["stage_count"]
    is_blocked, asked["blocked_scale_output"] = asked["blocked_scale_output"], False
    data, scale = _quant()._mxfp8_quantize_reference_3d(x, block_size=block_size, **asked)
    columns: Any = asked["scale_block_dim2"]
    scale = scale.reshape(len(x), -1, x.shape[2] // columns)  # the reference adds a dim of one for blocks of 32 x 32
    return data, _quant()._to_blocked_per_group_3d_layout(scale, scale_block_dim2=columns) if is_blocked else scale


def _quantize_columns(
    source: torch.Tensor, rowwise: bool, colwise: bool, block_x: int, block_y: int, dtype: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `torchao::mxfp8_quantize`: the cast along the first dim, with the strides of its fake kernel."""
    if (rowwise, colwise, block_x, block_y, dtype) != (False, True, 1, 32, "e4m3"):
        raise NotImplementedError("the virtual device casts as torchao 0.18 does: columns in blocks of 32, to e4m3")
    data, scale = reference_cast(source.t(), mode)
    return source.new_empty(0, dtype=E4M3), data.t(), source.new_empty(0, dtype=E8M0), scale.t().contiguous().t()


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


EXPERT_BODIES: dict[str, Body] = {
    "triton_fp8_rowwise_2d_fused_scale_and_cast_kernel": _float8_along(-1),
    "triton_fp8_colwise_3d_scale_and_cast_kernel": _float8_along(-2),
    "triton_fp8_rowwise_3d_transpose_scales_rhs_kernel": _float8_scales,
    "triton_fp8_rowwise_3d_transpose_cast_rhs_kernel": _float8_transposed,
    "triton_fp8_per_group_colwise_scales_dual_kernel": _float8_in_groups,
    "triton_scale_swizzle_per_group_3d": _blocked_experts,
    "triton_scale_swizzle_2d_K_groups": _blocked_columns,
}
_KERNELS: dict[str, Callable[..., object]] = {
    "mxfp8_quantize": _quantize_columns,
    "mx_block_rearrange_2d_M_groups": _blocked_rows,
    "mxfp8_quantize_2d_1x32_cutedsl": _quantize_rows,
    "mxfp8_quantize_2d_32x1_cutedsl": _quantize_columns_in_blocks,
    "mxfp8_quantize_3d_cutedsl": _quantize_experts,
    "fused_pad_token_groups": _pad,
    "fused_unpad_token_groups": _unpad,
}


CASTS = "torchao.prototype.mx_formats.kernels"
_EXPERTS = "grouped_casts"  # the last that is installed


def install_if_possible() -> None:
    """`install`, before anything else imports torchao's MXFP8. Without it, cases of MXFP8 say what is missing."""
    with contextlib.suppress(ImportError, RuntimeError):
        install()


def install() -> None:
    """Import torchao's MXFP8 with the operators `triton_to_mxfp8_dim0`, `triton_to_mxfp8_dim1` and `mxfp8_quantize`,
    and its training of experts.

    Raises RuntimeError where something has imported its stubs before, or torchao has other kernels.
    """
    if PROCESS.has(_EXPERTS):
        return
    if CASTS in sys.modules:
        raise RuntimeError(f"{CASTS} was imported before the virtual device. Fix: import it in `build`, or later.")
    for module, (_, bodies) in MODULES.items():
        with pretended_gpu(bodies):
            importlib.import_module(module)
    PROCESS.keep("casts")
    PROCESS.keep(_EXPERTS, install_for_experts())


def _cast_rows(*, x_ptr: torch.Tensor, output_ptr: torch.Tensor, scale_ptr: torch.Tensor, **constants: Any) -> None:
    data, scale = reference_cast(x_ptr, constants["SCALING_MODE"])
    output_ptr.copy_(data)
    scale_ptr.copy_(scale.view(torch.uint8))


def _cast_columns(*, x_ptr: torch.Tensor, **given: Any) -> None:
    data, scale = reference_cast(x_ptr.t(), given["SCALING_MODE"])
    given["output_col_major_ptr"].copy_(data)
    given["col_scale_ptr"].squeeze(-1).copy_(scale.view(torch.uint8))


def _swizzle(*, scale_ptr: torch.Tensor, output_ptr: torch.Tensor, **given: Any) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    output_ptr.view(-1).copy_(to_blocked(scale_ptr[: given["scale_rows"], : given["scale_cols"]]))


# Blockwise float8: scales are float32, of activations for 128 contracted values, of weights for 128 x 128.
BLOCKWISE = "torchao.prototype.blockwise_fp8_training.linear"


def _cast_blocks(block: Block, *, transposes: bool = False) -> Body:
    """Return a kernel that casts [rows, columns] in such blocks. Triton widens bfloat16 where it compares."""
    rows, length = block

    def body(*, x_ptr: Tensor, y_ptr: Tensor, s_ptr: Tensor, **constants: Any) -> None:
        values, limit = x_ptr.float(), constants["FP8_MAX"]
        blocks = values.unflatten(0, (-1, rows)).unflatten(-1, (-1, length))
        scale = (limit / blocks.abs().amax((1, 3)).clamp(min=constants["EPS"]).double()).float()
        factors = scale.repeat_interleave(rows, 0).repeat_interleave(length, 1)
        data = (values * factors).clamp_(-limit, limit).to(y_ptr.dtype)
        y_ptr.copy_(data.t() if transposes else data)
        s_ptr.copy_((scale.t() if transposes else scale).reciprocal())

    return body


# The GPUs on which each of these modules defines its operators, and the bodies of their kernels in Triton.
MODULES: dict[str, tuple[tuple[int, int], dict[str, Body]]] = {
    CASTS: (
        (10, 0),
        {
            "to_mxfp8_dim0_kernel": _cast_rows,
            "to_mxfp8_dim1_kernel": _cast_columns,
            "triton_scale_swizzle": _swizzle,
        },
    ),
    BLOCKWISE: (
        (9, 0),
        {
            "triton_fp8_blockwise_act_quant_lhs_kernel": _cast_blocks(SLICE),
            "triton_fp8_blockwise_act_quant_rhs_kernel": _cast_blocks(SLICE[::-1]),
            "triton_fp8_blockwise_act_quant_transposed_lhs_kernel": _cast_blocks(SLICE[::-1], transposes=True),
            "triton_fp8_blockwise_weight_quant_rhs_kernel": _cast_blocks(SQUARE),
            "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel": _cast_blocks(SQUARE, transposes=True),
        },
    ),
}
