"""Kernels of Triton and CUDA: what runs in their place on a CPU.

Triton's own interpreter runs its kernels on tensors of the CPU, where it is installed, with the first of the
configurations that a kernel may have. Compiled code calls a kernel as an operator. The interpreter keeps bfloat16 and
float8 as integers, and computes with these: with the types of `ml_dtypes` NumPy computes with their values. What it
lacks is inline assembly: `_ASSEMBLY` has a body for some instructions of PTX, and others are refused.

torchao defines its kernels of CUDA and CuTe for MXFP8 where it finds an SM 10.0 GPU: here they are the bodies of the
virtual device, and so are those of Triton where it is not installed.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.plugins.exec.worker.gpu import Unsupported, refusing
from harness.plugins.exec.worker.imports import after_import, around_import, has_interpreter, is_installed
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.process.process import PROCESS
from harness.worker.virtual import casts

Array = np.ndarray[Any, Any]
_PRIVATE = "_{}"  # of Triton: internals.toml lists parts of torch, without which nothing runs
_NARROW = {"bf16": "bfloat16", "fp8e5": "float8_e5m2", "fp8e4nv": "float8_e4m3fn", "fp8e4b8": "float8_e4m3fnuz"}


def install(capability: tuple[int, int]) -> None:
    """Run kernels from now on."""
    PROCESS.keep("histograms of integers", _histograms())
    torch.utils._triton.has_triton.cache_clear()  # torch may have looked before it was shown a GPU
    on_sm_100 = capability == (10, 0)
    if on_sm_100:
        PROCESS.keep("kernels of CUDA", casts.bodies_of_cuda())
        after_import(casts.CUTE_PROBE, lambda module: setattr(module, "_cutedsl_runtime_available", lambda: True))
    if has_interpreter():
        after_import("triton.runtime.interpreter", _interpreter)
        after_import("triton.runtime.autotuner", _autotuner)
        library: Any = torch.library
        library.triton_op, library.wrap_triton = casts.operator_of_triton, lambda kernel: kernel
    elif is_installed("triton"):
        after_import("triton.runtime.jit", _refuse)
    else:
        for module, (since, bodies) in casts.MODULES.items():
            if capability >= since:
                around_import(module, partial(casts.pretended_gpu, bodies))
        if on_sm_100:
            around_import(casts.PACKAGE, lambda: casts.pretended_gpu(casts.EXPERT_BODIES, available=casts.PROBES))


def _histograms() -> torch.library.Library:
    """A GPU counts integers too: `torch.histc` tells how many tokens each expert gets."""
    stock, keys = torch.library.get_kernel("aten::histc", "CPU"), torch.DispatchKeySet(torch.DispatchKey.CPU)

    def histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        counted = values if values.is_floating_point() else values.to(torch.float64)
        return stock.call_boxed(keys, counted, bins, min, max).to(values.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("histc", histc, "CPU", allow_override=True)
    fake = inspect.unwrap(torch._meta_registrations.meta_histc)  # refuses integers of "cpu"
    constants = (None if value == "cpu" else value for value in fake.__code__.co_consts)
    fake.__code__ = fake.__code__.replace(co_consts=tuple(constants))
    return library


def _refuse(module: Any) -> None:
    def run(self: Any, *_: Any, **__: Any) -> None:
        refusing(f"the Triton kernel {self.__name__}", "install ml_dtypes: Triton's interpreter then runs it")()

    module.JITFunction.run = run


def _autotuner(module: Any) -> None:
    setattr(module.Autotuner, _PRIVATE.format("bench"), lambda *_, **__: 0.0)  # the first is as good as any


def _interpreter(module: Any) -> None:
    import ml_dtypes

    own: Any = vars(module)
    stock = own[_PRIVATE.format("get_np_dtype")]
    narrow = {name: np.dtype(getattr(ml_dtypes, of)) for name, of in _NARROW.items()}

    def dtype_of(kind: Any) -> Any:
        return narrow.get(str(kind.scalar)) or stock(kind)

    def convert(values: Array, _: Any, to: Any, rounding: Any) -> Array:
        if rounding not in (None, own[_PRIVATE.format("ir")].ROUNDING_MODE.RTNE):
            raise Unsupported(f"no CPU rounds to {to} by {rounding}")
        dtype = dtype_of(to)
        if dtype.itemsize == 1:  # saturates, and has one NaN, as the instruction of a GPU: a CPU's may be negative
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            values = np.clip(values.astype(np.float32), -largest, largest)
            values = np.where(np.isnan(values), np.float32(np.nan), values)
        return values.astype(dtype)

    own.update(_get_np_dtype=dtype_of, _convert_float=convert)
    module.InterpreterBuilder.create_inline_asm = _assembly
    handle, of_bf16 = module.TensorHandle, (narrow["bf16"], module.tl.bfloat16)
    module.InterpreterBuilder.get_bf16 = lambda _, value: handle(np.array([value], of_bf16[0]), of_bf16[1])
    grid = module.GridExecutor
    launch = grid.__call__

    def launched(self: Any, *args: Any, **given: Any) -> None:
        if not casts.any_is_fake(*args, *given.values()):
            with unobserved():
                launch(self, *args, **given)

    grid.__call__ = launched


def _assembly(builder: Any, text: str, constraints: str, values: Sequence[Any], types: Any, *_: Any) -> Any:
    words = " ".join(text.split())
    if words not in _ASSEMBLY:
        raise Unsupported(f"no CPU runs this PTX: {words[:100]}")
    result = type(values[0])(_ASSEMBLY[words](*(value.data for value in values)), types[0].scalar)
    return type("Call", (), {"get_result": lambda *_: result})()


def _ue8m0_rounded_up(value: Array) -> Array:
    """Return the exponent of the least power of two that is not below a float32: 254 at most, and 255 for NaN."""
    bits = value.view(np.uint32) & 0x7FFFFFFF
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    up = fraction > np.where(exponent == 0, 0x400000, 0)  # e8m0 has 2**-127, which is a subnormal of float32
    return np.where(np.isnan(value), 255, np.minimum(exponent + up, 254)).astype(np.uint16)


_ASSEMBLY: dict[str, Callable[..., Array]] = {"cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;": _ue8m0_rounded_up}
