"""Installs the virtual FP8 device: replaces CPU kernels so that the real, non-emulated torchao path runs on a CPU.

`install()` patches torch for the life of the process and returns the names of the parts, which go into the trace.
Nothing is installed on CUDA.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist

from harness.worker.virtual import collectives, reductions, rng, scaled_mm, symm_mem

# torch.library drops an override when its Library object is collected.
_LIBRARIES: list[torch.library.Library] = []


PARTS = ("collectives", "scaled_mm", "symm_mem")


@functools.cache
def install() -> tuple[str, ...]:
    """Install all parts, once per process. Returns their names, sorted."""
    kernels = {"_scaled_mm": scaled_mm.scaled_mm, "_scaled_mm.out": scaled_mm.scaled_mm_out}
    _override("aten", kernels)
    _override("symm_mem", symm_mem.CPU_KERNELS)
    _override("c10d", collectives.CPU_KERNELS)
    symm_mem.install()
    rng.install()
    _without_pretended_gpus()
    dist.Backend.register_backend(collectives.BACKEND, collectives.create_backend, extended_api=True, devices=["cpu"])
    reductions.install()
    return PARTS


def _without_pretended_gpus() -> None:
    """Keep FakeTensorMode from registering eight pretended GPUs, as a CUDA build of torch does where it finds none.

    The next backward would start a thread for each, and a process with threads cannot be forked.
    """
    setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)  # noqa: B010  mypy rejects assigning to a function


def _override(namespace: str, kernels: Mapping[str, object]) -> None:
    library = torch.library.Library(namespace, "IMPL")
    _LIBRARIES.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
