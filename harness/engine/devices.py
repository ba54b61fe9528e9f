"""The slots this machine may lease: CPU ranks, or the CUDA devices visible to it. Uses neither torch nor CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from harness.engine.gpus import Gpu, installed_gpus, visible_gpus
from harness.engine.hardware import Device
from harness.engine.leases import Leases

# The largest world size of the tiers, and two more: a witness of one rank need not wait for the end of such a case.
# Ranks of a tiny model can share a core.
MIN_CPU_SLOTS = 10


def default_cpu_slots() -> int:
    """Returns how many CPU ranks may run at once on this machine: one per usable core, at least MIN_CPU_SLOTS."""
    return max(MIN_CPU_SLOTS, len(os.sched_getaffinity(0)))


def open_leases(
    folder: Path, device: Device, slots: int | None = None, note: Callable[[str], None] = lambda _: None
) -> Leases:
    """The leases of the slots of this machine, as many as `slots` or as fit, in a folder that its jobs share.

    Those of GPUs have their UUIDs, so that jobs with different CUDA_VISIBLE_DEVICES agree on who holds which one.
    `note` gets a message when they wait, which names the holders.
    """
    names = [gpu.uuid for gpu in cuda_devices(slots)] if device == "cuda" else None
    return Leases(folder / device, count_slots(device, slots), names=names, note=note)


def count_slots(device: Device, slots: int | None = None) -> int:
    """The number of slots for a request of `slots`: CPU ranks, or at most the CUDA devices of this machine."""
    return slots or default_cpu_slots() if device == "cpu" else len(cuda_devices(slots))


def cuda_devices(slots: int | None = None) -> tuple[Gpu, ...]:
    """The CUDA devices this process may use, in the order of their CUDA indices; at most so many."""
    return _cuda_devices(os.environ.get("PATH"), os.environ.get("CUDA_VISIBLE_DEVICES"))[:slots]


@functools.cache
def _cuda_devices(*_: str | None) -> tuple[Gpu, ...]:
    """Cached per environment: nvidia-smi may take seconds."""
    return visible_gpus(os.environ, installed_gpus(os.environ))
