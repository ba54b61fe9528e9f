"""Imports torchao as if an SM 10.0 GPU and Triton were there, with bodies in torch for kernels that it launches."""

import contextlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

Body = Callable[..., None]
E4M3 = torch.float8_e4m3fn


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
        raise RuntimeError(f"torchao has no kernel {name}: the virtual device knows those of torchao 0.18.")


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


def _operator(name: str, **_: Any) -> Callable[[Callable[..., Any]], Any]:
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
        from torch._subclasses.fake_tensor import is_fake

        if any(is_fake(tensor) for tensor in (*args, *named.values()) if isinstance(tensor, torch.Tensor)):
            return
        if self._body is None:
            raise NotImplementedError(f"the virtual device has no body for the kernel {self._name} of torchao")
        self._body(**self._signature.bind_partial(*args, **named).arguments)


def _yes(*_: object) -> bool:
    return True


_PRETENDED: Mapping[str, object] = {
    "torch.cuda.is_available": _yes,
    "torch.cuda.get_device_capability": lambda *_: (10, 0),
    "torch.utils._triton.has_triton": _yes,
    "torchao.utils.is_sm_at_least_100": _yes,
    "torchao.utils.is_cuda_version_at_least": _yes,
    "torch.library.triton_op": _operator,
    "torch.library.wrap_triton": lambda kernel: kernel,
}
