"""Which slots this process may lease: places for CPU ranks, or the CUDA devices visible to it. No torch, no CUDA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

MIN_CPU_SLOTS = 8  # the widest worlds of the tiers; ranks of a tiny model share a core well
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_SMI_TIMEOUT_S = 30.0


def default_cpu_slots() -> int:
    """Returns how many CPU ranks may run at once on this box: one per usable core, at least 8."""
    return max(MIN_CPU_SLOTS, len(os.sched_getaffinity(0)))


def cuda_names(environ: Mapping[str, str], *, proc: Path = _NVIDIA_GPUS) -> tuple[str, ...]:
    """Returns the CUDA devices this process may use, in the order of their CUDA indices; empty without any.

    A name is what CUDA_VISIBLE_DEVICES calls the device, its number on the box when that is not set. It is the name
    to lease by: two jobs with different CUDA_VISIBLE_DEVICES then agree on who holds which device.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(index) for index in range(_installed(environ, proc)))
    return _parse_visible(visible)


def _parse_visible(visible: str) -> tuple[str, ...]:
    """CUDA reads the list up to the first entry that names no device; a device named twice means none at all."""
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
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, env=dict(environ), check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0  # no driver, no devices
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
