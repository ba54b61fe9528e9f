"""The machine: which device a run uses and what hardware class its goldens have. Never imports torch.

Owns the meaning of `--device auto`. Which devices may be used is `engine/devices.py`'s.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from harness.engine.devices import cuda_names
from harness.errors import HarnessError
from harness.evidence.hardware import hardware_class, hardware_classes

Device = Literal["cpu", "cuda"]

_DRIVER = Path("/proc/driver/nvidia/gpus")
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_ASK_TIMEOUT_S = 20.0

CPUINFO = Path("/proc/cpuinfo")
# x86 has a model name and flags; ARM has numbers of its maker and part, and features.
_KIND = r"^(?:vendor_id|cpu family|model|model name|flags|CPU implementer|CPU part|CPU variant|Features)\s*:.*$"
_VECTOR = re.compile(r"(avx|amx|sve)\w*|sme\d*|fma|asimd|bf16|i8mm")


def resolve_device(asked: str) -> Device:
    """The device that `auto`, `cpu` or `cuda` means here; HarnessError for `cuda` on a machine without one."""
    if asked == "cpu":
        return "cpu"
    if cuda_names(os.environ):
        return "cuda"
    if asked == "cuda":
        raise HarnessError("there is no CUDA device here.", where="--device cuda", fix="use --device cpu.")
    return "cpu"


def hardware(device: Device) -> str:
    """The most specific hardware class of the first device that a run uses: `cpu`, or such as `nvidia-h200`."""
    return hardware_class(device_name(device))


def all_hardware(device: Device) -> tuple[str, ...]:
    """All hardware classes of that device, the most specific first: goldens of each serve."""
    return hardware_classes(device_name(device), architecture(device))


def architecture(device: Device) -> str:
    """The architecture of the first GPU, such as "sm90"; empty on a CPU, and where nvidia-smi does not tell."""
    listed = "" if device == "cpu" else _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.match(r"(\d+)\.(\d+)", listed)
    return f"sm{found[1]}{found[2]}" if found else ""


def device_name(device: Device) -> str:
    """The name of the device that ranks run on, as they report it: "cpu", or such as "NVIDIA H200"."""
    return "cpu" if device == "cpu" else _cuda_name()


def driver_version() -> str:
    """The version of the NVIDIA driver; empty where the kernel names none."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", _read(_DRIVER_VERSION))
    return found[1] if found else ""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; None when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_rank_packages() -> None:
    """Raises HarnessError where a package that ranks import is not installed; imports none of them."""
    missing = [name for name in ("torch", "torchao") if importlib.util.find_spec(name) is None]
    if missing:
        raise HarnessError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and ranks cannot train "
            "without.",
            fix="pip install 'fp8-harness[train]'",
        )


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


def _cuda_name() -> str:
    """Name of the first GPU; machines with different GPUs side by side are not supported."""
    for folder in sorted(_DRIVER.iterdir()) if _DRIVER.is_dir() else ():
        found = re.search(r"^Model:\s*(.+?)\s*$", (folder / "information").read_text(), flags=re.MULTILINE)
        if found:
            return found[1]
    names = _listed_names()
    if not names:
        raise HarnessError("cannot find the name of the CUDA device.", fix="see why nvidia-smi -L lists none.")
    return names[0]


def _listed_names() -> list[str]:
    """GPU names that nvidia-smi lists; none without it."""
    return re.findall(r"^GPU \d+: (.+?) \(UUID", _nvidia_smi("-L"), flags=re.MULTILINE)


def _nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# What makes the same machine compute differently.
_ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FP8_HARNESS_RANK_THREADS")


def arithmetic_limits() -> str:
    """The environment variables that limit CPU arithmetic, as `NAME=value NAME=value`; empty where none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _ARITHMETIC if os.environ.get(name))
