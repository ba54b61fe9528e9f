"""The MXFP8 casts of an SM 10.0 GPU on a CPU: torchao's own operators, with the bodies of their kernels in torch.

torchao defines these operators, their fake kernels and their sharding rules where it finds such a GPU. It is imported
as if there were one: sizes, dtypes, strides, assertions and placements are torchao's. What the kernels compute is its
reference cast, to which its tests hold them bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_KERNELS = "torchao.prototype.mx_formats.kernels"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def install_if_possible() -> None:
    """`install`, before anything else imports torchao's MXFP8. Without it, cases of MXFP8 say what is missing."""
    with contextlib.suppress(ImportError, RuntimeError):
        install()


@functools.cache
def install() -> None:
    """Import torchao's MXFP8 with the operators `triton_to_mxfp8_dim0`, `triton_to_mxfp8_dim1` and `mxfp8_quantize`.

    Raises RuntimeError where something has imported its stubs before, or torchao has other kernels.
    """
    if _KERNELS in sys.modules:
        raise RuntimeError(f"{_KERNELS} was imported before the virtual device. Fix: import it in `build`, or later.")
    with _pretended_gpu():
        kernels = importlib.import_module(_KERNELS)
    for name, body in _BODIES.items():
        if not hasattr(kernels, name):
            raise RuntimeError(f"{_KERNELS} has no {name}: the virtual device knows MXFP8 of torchao 0.18.")
        setattr(kernels, name, body)
    torch.library.impl("torchao::mxfp8_quantize", "CPU", _quantize)


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    """What torchao asks before it defines its kernels, and a Triton whose kernels are never compiled."""
    yes = functools.partial(mock.patch, new=lambda *_: True)
    with (
        yes("torch.cuda.is_available"),
        yes("torch.utils._triton.has_triton"),
        yes("torchao.utils.is_sm_at_least_100"),
        yes("torchao.utils.is_cuda_version_at_least"),
        mock.patch("torch.library.triton_op", _operator),
        mock.patch("torch.library.wrap_triton", _Launch),
    ):
        stand_in = _triton()
        before = {name: sys.modules.get(name) for name in stand_in}
        sys.modules.update(stand_in)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


def _as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _triton() -> dict[str, types.ModuleType]:
    names: Any = types.ModuleType("triton"), types.ModuleType("triton.language")
    names[0].language, names[1].constexpr = names[1], bool
    names[0].jit, names[0].autotune, names[0].Config = lambda kernel: kernel, _as_it_is, dict
    names[0].cdiv = lambda a, b: -(-a // b)
    return {module.__name__: module for module in names}


def _operator(name: str, **_: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton_op`: an operator whose fake kernel is its own code, which launches nothing for fake tensors."""

    def decorate(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(function)
        return operator

    return decorate


class _Launch:
    """`wrap_triton(kernel)[grid](...)`: runs the body once, for all of the grid."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        from torch._subclasses.fake_tensor import is_fake

        if not any(is_fake(each) for each in (*args, *named.values()) if isinstance(each, torch.Tensor)):
            self._body(*args, **named)


def _reference(source: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of torchao's reference cast, one scale for 32 values of the last dim."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, data = to_mx(source.contiguous(), E4M3, 32, ScaleCalculationMode(mode))
    return data, scale


def _cast_rows(*, x_ptr: torch.Tensor, output_ptr: torch.Tensor, scale_ptr: torch.Tensor, **constants: Any) -> None:
    data, scale = _reference(x_ptr, constants["SCALING_MODE"])
    output_ptr.copy_(data)
    scale_ptr.copy_(scale.view(torch.uint8))


def _cast_columns(*, x_ptr: torch.Tensor, **given: Any) -> None:
    data, scale = _reference(x_ptr.t(), given["SCALING_MODE"])
    given["output_col_major_ptr"].copy_(data)
    given["col_scale_ptr"].squeeze(-1).copy_(scale.view(torch.uint8))


def _swizzle(scale: torch.Tensor, rows: int, columns: int, swizzled: torch.Tensor, *_: Any, **__: Any) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    swizzled.view(-1).copy_(to_blocked(scale[:rows, :columns]))


def _quantize(
    source: torch.Tensor, rowwise: bool, colwise: bool, block_x: int, block_y: int, dtype: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `torchao::mxfp8_quantize`: the cast along the first dim, with the strides of its fake kernel."""
    if (rowwise, colwise, block_x, block_y, dtype) != (False, True, 1, 32, "e4m3"):
        raise NotImplementedError("the virtual device casts as torchao 0.18 does: columns in blocks of 32, to e4m3")
    data, scale = _reference(source.t(), mode)
    return source.new_empty(0, dtype=E4M3), data.t(), source.new_empty(0, dtype=E8M0), scale.t().contiguous().t()


_BODIES: dict[str, Callable[..., None]] = {
    "to_mxfp8_dim0_kernel": _cast_rows,
    "to_mxfp8_dim1_kernel": _cast_columns,
    "triton_scale_swizzle": _swizzle,
}
