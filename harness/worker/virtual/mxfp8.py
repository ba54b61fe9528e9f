"""The MXFP8 casts of an SM 10.0 GPU on a CPU: torchao's own operators, with the bodies of their kernels in torch.

torchao defines these operators, their fake kernels and their sharding rules where it finds such a GPU. It is imported
as if there were one: sizes, dtypes, strides, assertions and placements are torchao's. What the kernels compute is its
reference cast, to which its tests hold them bit for bit.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from harness.worker.process.process import PROCESS
from harness.worker.virtual import grouped_casts
from harness.worker.virtual.pretended_gpu import E4M3, pretended_gpu, reference_cast

_KERNELS = "torchao.prototype.mx_formats.kernels"
E8M0 = torch.float8_e8m0fnu
_EXPERTS = "grouped_casts"  # the last that is installed


def install_if_possible() -> None:
    """`install`, before anything else imports torchao's MXFP8. Without it, cases of MXFP8 say what is missing."""
    with contextlib.suppress(ImportError, RuntimeError):
        install()


def install() -> None:
    """Import torchao's MXFP8 with the operators `triton_to_mxfp8_dim0`, `triton_to_mxfp8_dim1` and `mxfp8_quantize`,
    and its training of experts (`grouped_casts`).

    Raises RuntimeError where something has imported its stubs before, or torchao has other kernels.
    """
    if PROCESS.has(_EXPERTS):
        return
    if _KERNELS in sys.modules:
        raise RuntimeError(f"{_KERNELS} was imported before the virtual device. Fix: import it in `build`, or later.")
    with pretended_gpu(_BODIES):
        importlib.import_module(_KERNELS)
    torch.library.impl("torchao::mxfp8_quantize", "CPU", _quantize)
    PROCESS.keep("mxfp8")
    PROCESS.keep(_EXPERTS, grouped_casts.install())


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


def _quantize(
    source: torch.Tensor, rowwise: bool, colwise: bool, block_x: int, block_y: int, dtype: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `torchao::mxfp8_quantize`: the cast along the first dim, with the strides of its fake kernel."""
    if (rowwise, colwise, block_x, block_y, dtype) != (False, True, 1, 32, "e4m3"):
        raise NotImplementedError("the virtual device casts as torchao 0.18 does: columns in blocks of 32, to e4m3")
    data, scale = reference_cast(source.t(), mode)
    return source.new_empty(0, dtype=E4M3), data.t(), source.new_empty(0, dtype=E8M0), scale.t().contiguous().t()


_BODIES: dict[str, Callable[..., None]] = {
    "to_mxfp8_dim0_kernel": _cast_rows,
    "to_mxfp8_dim1_kernel": _cast_columns,
    "triton_scale_swizzle": _swizzle,
}
