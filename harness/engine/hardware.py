"""This machine: what the kernel and the driver say of it, the slots that it may lease, and its capacity.

Uses neither torch nor CUDA. Its GPUs are in `gpus.py`.
"""

import functools
import math
import os
import platform
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from harness.engine.gpus import (
    Gpu,
    architecture_of,
    driver_version,
    in_use,
    installed_gpus,
    kind_of,
    read_each_other,
    visible_gpus,
)
from harness.engine.leases import Leases
from harness.engine.linux import cpu_quota, read_text
from harness.engine.messages import Message

Device = Literal["cpu", "cuda"]

CPUINFO = Path("/proc/cpuinfo")
# x86 has a model name and flags; ARM has numbers of its maker and part, and features.
_KIND = r"^(?:vendor_id|cpu family|model|model name|flags|CPU implementer|CPU part|CPU variant|Features)\s*:.*$"
_VECTOR = re.compile(r"(avx|amx|sve)\w*|sme\d*|fma|asimd|bf16|i8mm")


def host_name() -> str:
    return socket.gethostname() or "localhost"


def cpu_kind(cpuinfo: Path = CPUINFO) -> str:
    """Model and instruction sets of the first CPU, as the kernel lists them; empty where it lists none."""
    first = read_text(cpuinfo).partition("\n\n")[0]
    return "; ".join(re.findall(_KIND, first, flags=re.MULTILINE))


def cpu_extensions(cpuinfo: Path = CPUINFO) -> str:
    """Model name of the CPU and its extensions for vectors and matrices; empty where the kernel names none."""
    text = read_text(cpuinfo).partition("\n\n")[0]
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    wide = [flag for flag in flags[1].split() if _VECTOR.fullmatch(flag)] if flags else []
    return " ".join(filter(None, [_model(text), ", ".join(wide)]))


def cpu_name() -> str:
    """Model of the CPU, or its architecture where nothing lists it, and how many of its threads processes may use."""
    return f"{_model(read_text(CPUINFO)) or platform.machine() or 'unknown CPU'}, {usable_cpus()} threads"


def _model(cpuinfo: str) -> str:
    """The model name on x86. ARM has the numbers of a maker and of its part, such as 0x41 and 0xd4f for Neoverse V2."""
    pairs = re.findall(r"^(model name|CPU implementer|CPU part)\s*:\s*(.+)$", cpuinfo, flags=re.MULTILINE)
    named: dict[str, str] = dict(pairs)
    part = f"ARM {named.get('CPU implementer', '')} {named['CPU part']}" if "CPU part" in named else ""
    return named.get("model name", part)


def usable_cpus() -> int:
    """How many CPUs this process may use, by its affinity and by the quota of its control groups; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cpu_quota())))


# What makes the same machine compute differently.
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FP8_HARNESS_RANK_THREADS")


def arithmetic_limits() -> str:
    """The environment variables that limit CPU arithmetic, as `NAME=value NAME=value`; empty where none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in ARITHMETIC if os.environ.get(name))


# The largest world size of the tiers, and two more: a witness of one rank need not wait for the end of such a case.
# Ranks of a tiny model can share a core.
MIN_CPU_SLOTS = 10


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
    """The number of slots: `slots`, by default a CPU rank per usable core; or at most the CUDA devices."""
    if device == "cpu":
        return slots or max(MIN_CPU_SLOTS, usable_cpus())
    return len(cuda_devices(slots))


def cuda_devices(slots: int | None = None) -> tuple[Gpu, ...]:
    """The CUDA devices this process may use, in the order of their CUDA indices; at most so many."""
    return _cuda_devices(os.environ.get("PATH"), os.environ.get("CUDA_VISIBLE_DEVICES"))[:slots]


@functools.cache
def _cuda_devices(*_: str | None) -> tuple[Gpu, ...]:
    """Cached per environment: nvidia-smi may take seconds."""
    return visible_gpus(os.environ, installed_gpus(os.environ))


class NodeCapacity(Message, frozen=True, kw_only=True):
    """What one machine has. `slots` is how many ranks (CPU) or devices (CUDA) it runs at the same time."""

    host: str
    slots: int
    device: Device
    device_name: str  # as ranks report it: "cpu", or such as "NVIDIA H200"
    architecture: str = ""  # such as "sm90"; empty on a CPU
    driver: str = ""  # version of the NVIDIA driver; empty on a CPU
    peers: bool | None = None  # each of its GPUs can read the memory of the others; None: nothing says so
    cpu: str = ""  # model and extensions
    threads: int = 0  # of the CPU, that its processes may use
    in_use: tuple[str, ...] = ()  # a sentence for each GPU that other processes computed on before the first case

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of its GPUs, (9, 0) for "sm90"; None where it is not known."""
        match = re.fullmatch(r"sm(\d+)(\d)", self.architecture)
        return (int(match[1]), int(match[2])) if match else None


class Capacity(Message, frozen=True, kw_only=True):
    nodes: tuple[NodeCapacity, ...] = ()

    @property
    def total(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def largest(self) -> int:
        return max((node.slots for node in self.nodes), default=0)

    @property
    def words(self) -> str:
        """ "8 x NVIDIA H100 80GB HBM3", or "cpu": its slots are no devices."""
        first = self.nodes[0]
        return first.device_name if first.device == "cpu" else f"{self.total} x {first.device_name}"


def capacity_here(device: Device, slots: int | None = None) -> NodeCapacity:
    """The capacity of this machine with `slots`, or as many as fit. Raises HarnessError for unnamed or mixed GPUs."""
    gpus = cuda_devices(slots) if device == "cuda" else ()
    return NodeCapacity(
        host=host_name(),
        slots=count_slots(device, slots),
        device=device,
        device_name=kind_of(gpus) if device == "cuda" else "cpu",
        architecture=architecture_of(gpus, os.environ),
        driver=driver_version(os.environ) if device == "cuda" else "",
        peers=read_each_other(gpus, os.environ),
        cpu=cpu_extensions(),
        threads=usable_cpus(),
        in_use=in_use(gpus, os.environ),
    )
