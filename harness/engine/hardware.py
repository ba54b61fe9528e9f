"""The hardware of this machine, as reported by the kernel and the driver. Never imports torch.

Its GPUs are in `gpus.py`; which devices may be used is `devices.py`'s.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")

CPUINFO = Path("/proc/cpuinfo")
# x86 has a model name and flags; ARM has numbers of its maker and part, and features.
_KIND = r"^(?:vendor_id|cpu family|model|model name|flags|CPU implementer|CPU part|CPU variant|Features)\s*:.*$"
_VECTOR = re.compile(r"(avx|amx|sve)\w*|sme\d*|fma|asimd|bf16|i8mm")


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname() or "localhost"


def driver_version() -> str:
    """The version of the NVIDIA driver; empty where the kernel names none."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", _read(_DRIVER_VERSION))
    return found[1] if found else ""


def cpu_kind(cpuinfo: Path = CPUINFO) -> str:
    """Model and instruction sets of the first CPU, as the kernel lists them; empty where it lists none."""
    first = _read(cpuinfo).partition("\n\n")[0]
    return "; ".join(re.findall(_KIND, first, flags=re.MULTILINE))


def cpu_extensions(cpuinfo: Path = CPUINFO) -> str:
    """Model name of the CPU and its extensions for vectors and matrices; empty where the kernel names none."""
    text = _read(cpuinfo).partition("\n\n")[0]
    name = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    wide = [flag for flag in flags[1].split() if _VECTOR.fullmatch(flag)] if flags else []
    return " ".join(filter(None, [name[1] if name else "", ", ".join(wide)]))


def cpu_name() -> str:
    """Model name of the CPU and how many of its threads this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(CPUINFO), flags=re.MULTILINE)
    return f"{found[1] if found else 'unknown CPU'}, {len(os.sched_getaffinity(0))} threads"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# What makes the same machine compute differently.
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FP8_HARNESS_RANK_THREADS")


def arithmetic_limits() -> str:
    """The environment variables that limit CPU arithmetic, as `NAME=value NAME=value`; empty where none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in ARITHMETIC if os.environ.get(name))
