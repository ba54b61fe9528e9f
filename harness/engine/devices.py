"""The slots this process may lease: CPU ranks, or the CUDA devices visible to it. Uses neither torch nor CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# The largest world size of the tiers, and two more: a witness of one rank need not wait for the end of such a case.
# Ranks of a tiny model can share a core.
MIN_CPU_SLOTS = 10
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_SMI_TIMEOUT_S = 30.0


def default_cpu_slots() -> int:
    """Returns how many CPU ranks may run at once on this machine: one per usable core, at least MIN_CPU_SLOTS."""
    return max(MIN_CPU_SLOTS, len(os.sched_getaffinity(0)))


def cuda_names(environ: Mapping[str, str], *, proc: Path = _NVIDIA_GPUS) -> tuple[str, ...]:
    """Returns the names of the CUDA devices this process may use, in the order of their CUDA indices.

    A name is what CUDA_VISIBLE_DEVICES calls the device, or its number on this machine when that is not set. Leases use
    these names, so that jobs with different CUDA_VISIBLE_DEVICES agree on who holds which device.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(index) for index in range(_installed(environ, proc)))
    return _parse_visible(visible)


def _parse_visible(visible: str) -> tuple[str, ...]:
    """Parses the list as CUDA does: up to the first invalid entry; a duplicate makes all devices invisible."""
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(str(int(name)) if name.isdecimal() else name)
    return tuple(names) if len(set(names)) == len(names) else ()


def _installed(environ: Mapping[str, str], proc: Path) -> int:
    if proc.is_dir():
        return sum(1 for _ in proc.iterdir())
    try:
        command = ["nvidia-smi", "--list-gpus"]
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, env=dict(environ), check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0  # no driver, no devices
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
