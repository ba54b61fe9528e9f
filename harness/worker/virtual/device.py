"""Installs the virtual FP8 device: replaces CPU kernels so that the real, non-emulated torchao path runs on a CPU.

`install()` patches torch for the life of the process and returns the names of the parts, which go into the trace.
On CUDA it installs the exact matmul where that is asked for, and nothing else.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness.request import Arithmetic, Backend
from harness.worker.dispatch_hooks.hook import install_hooks
from harness.worker.process import internals
from harness.worker.process.process import PROCESS
from harness.worker.virtual import collectives, grouped_mm, matmul, scaled_mm
from harness.worker.virtual.collectives import below_autograd, memory

# What of `PROCESS.installed` is a part of the virtual device.
_PARTS = frozenset({"casts", "collectives", "gloo", "scaled_mm", "symm_mem"})


def install(
    backend: Backend = "shared", *, device: str = "cpu", arithmetic: Arithmetic = "exact", compiled: bool = True
) -> tuple[str, ...]:
    """Install what ranks on this kind of device need, with collectives over this backend from now on, and all hooks.

    `compiled`: what only compiled runs need, too, which takes a second. The exact matmul stays for the life of the
    process. Returns the names of all parts that are installed, sorted.
    """
    install_hooks(compiled=compiled)
    if arithmetic == "exact":
        _install_exact(device.upper())
    if device == "cpu":
        if compiled:
            _install_for_compiled()
        _install_device()
        _install_transport(backend)
    return tuple(name for name in PROCESS.installed if name in _PARTS)


@functools.cache
def _install_exact(key: str) -> None:
    versions: tuple[Callable[..., torch.Tensor], ...] = (scaled_mm.scaled_mm, scaled_mm.scaled_mm_v2)
    kernels = {f"_{version.__name__}": version for version in versions}
    kernels |= {f"{name}.out": scaled_mm.into(kernel) for name, kernel in kernels.items()}
    kernels |= {
        "_grouped_mm": grouped_mm.exact(key),
        "_scaled_grouped_mm": grouped_mm.scaled_grouped_mm,
        "_scaled_grouped_mm_v2": grouped_mm.scaled_grouped_mm_v2,
    }
    if key == "CPU":
        kernels |= matmul.kernels()
    PROCESS.keep("scaled_mm", _override("aten", kernels, key))


def _install_transport(backend: Backend) -> None:
    name, other = ("gloo", "collectives") if backend == "gloo" else ("collectives", "gloo")
    if not PROCESS.has(name):
        PROCESS.take_back(other)
        if backend == "gloo":
            from harness.worker.virtual import gloo

            PROCESS.keep(name, _override("c10d", gloo.CPU_KERNELS))
        else:
            PROCESS.keep(name, _over_fabric())


def _over_fabric() -> torch.library.Library:
    """Return the groups of the shared-memory backend. Other backends keep torch's kernels: a target may have
    gloo's.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name, kernel in collectives.CPU_KERNELS.items():
        stock = torch.library.get_kernel(f"c10d::{name}", "CPU")
        library.impl(name, _of_fabric(kernel, stock), "CPU", with_keyset=True, allow_override=True)
    return library


def _of_fabric(kernel: Callable[..., Any], stock: Any) -> Callable[..., Any]:
    def run(keyset: torch.DispatchKeySet, *args: Any) -> Any:
        group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))  # comes before the rest
        if collectives.FABRIC.owns(dist.ProcessGroup.unbox(group).group_name):
            return kernel(*args)
        return stock.call_boxed(keyset, *args)

    return run


@functools.cache
def _install_for_compiled() -> None:
    if not internals.gaps(internals.ASYNC_TP):
        from harness.worker.virtual import symm_mem

        symm_mem.install()
        PROCESS.keep("symm_mem", _override("symm_mem", symm_mem.CPU_KERNELS))
    if not internals.gaps(internals.COMPILED):
        from harness.worker.virtual import graph_backend

        graph_backend.install()
        PROCESS.keep("graph_backend")


@functools.cache
def _install_device() -> None:
    _without_pretended_gpus()
    dist.Backend.register_backend(collectives.BACKEND, collectives.create_backend, extended_api=True, devices=["cpu"])
    _scale_before_reductions()
    PROCESS.keep("process groups of the device")
    if not internals.gaps("inductor"):
        from harness.worker.virtual import inductor

        inductor.leave_out()
    if not internals.gaps("autocast"):
        from harness.worker.virtual import autocast

        autocast.install_state()
        PROCESS.keep("autocast", _override("aten", autocast.kernels(), "AutocastCPU"))


def _without_pretended_gpus() -> None:
    """Keep FakeTensorMode from registering eight pretended GPUs, as a CUDA build of torch does where it finds none.

    The next backward would start a thread for each, and a process with threads cannot be forked.
    """
    setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)  # noqa: B010  mypy rejects assigning to a function


def _override(namespace: str, kernels: Mapping[str, object], key: str = "CPU") -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key, allow_override=True)
    return library


def _scale_before_reductions() -> None:
    """PREMUL_SUM, for which FSDP2 asks wherever a gradient divide factor is set.

    Neither backend can read the factor of it in a c10d operator, so tensors are scaled before, in the methods of every
    process group of this process.
    """
    group: Any = dist.ProcessGroup
    group.reduce_scatter_single = _scaled_reduce_scatter(group.reduce_scatter_single)
    group.allreduce = _scaled_allreduce(group.allreduce)


def _factor(op: Any) -> float | None:
    """Return the factor of a PREMUL_SUM reduction; None for other reductions."""
    if op != ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()
    assert isinstance(factor, float), f"PREMUL_SUM by a tensor is not supported, got {factor!r}"
    return factor


def _scaled_reduce_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        factor = _factor(options.reduceOp)
        if factor is not None:
            tensor = tensor if factor == 1.0 else tensor.detach() * factor
            options.reduceOp = ReduceOp.SUM
        return stock(group, output, tensor, options)

    return method


def _scaled_allreduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: Any, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is None:
            return stock(group, tensors)
        factor = _factor(options.reduceOp)
        if factor is not None:
            for tensor in tensors:
                with below_autograd():
                    memory(tensor).mul_(factor)
            options.reduceOp = ReduceOp.SUM
        return stock(group, tensors, options)

    return method
