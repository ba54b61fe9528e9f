"""The shims that only torchtitan 0.3.0 needs, and its import. Those of both versions are in `torchtitan/shims.py`."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.matrix.targets import TORCHTITAN_0_3
from harness.worker.targets.torchtitan.shims import import_version_of


@functools.cache
def import_torchtitan() -> None:
    """Import torchtitan with every shim that its import needs, once per process."""
    import_version_of(TORCHTITAN_0_3, "torchtitan.trainer", without_triton)


def without_triton() -> None:
    """Stand in for torchtitan's Triton kernels of expert parallelism where Triton is missing (a CPU torch).

    Importing its Trainer imports them, and a Llama never calls them.
    Can go when torchtitan's Trainer can be imported without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        kernels: Any = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
        kernels.__getattr__ = _needs_triton
        sys.modules[kernels.__name__] = kernels


def _needs_triton(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torchtitan's kernel {name} needs Triton, which is not installed")

    return kernel


@contextmanager
def float64_kept() -> Iterator[None]:
    """While torchtitan computes its loss, `Tensor.float` leaves float64 as it is: float64 is the dtype of proof.

    Can go when torchtitan's loss rounds no float64 to float32.
    """
    rounds = torch.Tensor.float
    tensor: Any = torch.Tensor
    tensor.float = lambda self: self if self.dtype is torch.float64 else rounds(self)
    try:
        yield
    finally:
        tensor.float = rounds
