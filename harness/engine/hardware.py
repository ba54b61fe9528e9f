"""This machine: what the kernel and the driver say of it, its GPUs, the slots that it may lease, and its capacity.

Uses neither torch nor CUDA: it asks nvidia-smi, or the driver's files in /proc where that is missing.
"""

import functools
import math
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from harness.engine.leases import Leases
from harness.engine.linux import cpu_quota, read_text
from harness.engine.messages import Message
from harness.errors import HarnessError
from harness.text import binary_bytes, counted

_PROC = Path("/proc/driver/nvidia/gpus")
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_ASK_TIMEOUT_S = 30.0
_GPU = re.compile(r"^GPU (\d+): (.+?) \(UUID: (\S+)\)")
_COLUMN = re.compile(r"GPU\d+")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")
_PART = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a MIG instance. `uuid` is the same in every process of the machine, whatever the index there."""

    uuid: str
    index: int | None = None  # as nvidia-smi counts; None if nothing lists the GPU
    name: str = ""  # as ranks report it, such as "NVIDIA H200"; empty if nothing lists the GPU
    parts: tuple["Gpu", ...] = ()  # its MIG instances: CUDA then shows these and not the whole


def installed_gpus(environ: Mapping[str, str], *, proc: Path = _PROC) -> tuple[Gpu, ...]:
    """Return all GPUs of this machine in the order of nvidia-smi; none without a driver."""
    gpus: list[Gpu] = []
    for line in ask_driver(environ, "-L").splitlines():
        if match := _GPU.match(line):
            gpus.append(Gpu(uuid=match[3], index=int(match[1]), name=match[2]))
        elif gpus and (match := _PART.match(line)):
            whole = gpus[-1]
            part = Gpu(uuid=match[2], index=whole.index, name=f"{whole.name} MIG {match[1]}")
            gpus[-1] = msgspec.structs.replace(whole, parts=(*whole.parts, part))
    return tuple(gpus) or tuple(_from_proc(proc))


def _from_proc(proc: Path) -> Iterator[Gpu]:
    """Yield the GPUs by the files of the driver, which it sorts by bus as nvidia-smi does."""
    for index, folder in enumerate(sorted(proc.iterdir()) if proc.is_dir() else ()):
        facts = _facts(folder / "information")
        uuid = facts.get("GPU UUID", "")
        known = uuid and "?" not in uuid  # not read yet from a GPU that nothing uses
        yield Gpu(uuid=uuid if known else str(index), index=index, name=facts.get("Model", ""))


def _facts(file: Path) -> Mapping[str, str]:
    lines = read_text(file).splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows a process with this environment, in the order of their CUDA indices.

    Reads CUDA_VISIBLE_DEVICES as CUDA does: up to the first entry that is no GPU; a GPU twice makes all invisible. Of a
    GPU with MIG it is the first instance, and no other GPU beside it:
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#cuda-visible-devices. Entries are kept as they are where
    nothing lists the GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    named = gpus if visible is None else tuple(_named(visible, gpus))
    shown = tuple(gpu.parts[0] if gpu.parts else gpu for gpu in named)
    if len({gpu.uuid for gpu in shown}) < len(shown):
        return ()
    return next(((gpu,) for gpu in shown if gpu.uuid.startswith("MIG-")), shown)


def _named(visible: str, gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    for entry in map(str.strip, visible.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            return
        name = str(int(entry)) if entry.isdecimal() else entry
        matches = [gpu for whole in gpus for gpu in (whole, *whole.parts) if _is_called(gpu, name)]
        if gpus and len(matches) != 1:  # no such GPU, or the start of several UUIDs
            return
        yield matches[0] if gpus else Gpu(uuid=name)


def _is_called(gpu: Gpu, name: str) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES calls the GPU so: by its number, its UUID, or the start of that."""
    if name.isdecimal():
        return gpu.index == int(name) and not gpu.uuid.startswith("MIG-")
    return gpu.uuid.startswith(name)


def kind_of(gpus: Sequence[Gpu]) -> str:
    """Return the name that these GPUs share, as ranks report it. HarnessError if they have none or several."""
    kinds: dict[str, list[int | None]] = {}
    for gpu in gpus:
        kinds.setdefault(gpu.name, []).append(gpu.index)
    if len(kinds) > 1:
        listed = "; ".join(f"{name} ({', '.join(map(str, indices))})" for name, indices in kinds.items())
        first = ",".join(map(str, next(iter(kinds.values()))))
        raise HarnessError(
            f"there are different GPUs side by side: {listed}. A run uses one kind of GPU.",
            where="--device cuda",
            fix=f"choose one kind, such as CUDA_VISIBLE_DEVICES={first}.",
        )
    if not any(kinds):
        raise HarnessError("cannot find the name of the CUDA device.", fix="see why nvidia-smi -L lists none.")
    return next(iter(kinds))


def architecture_of(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    """Return the architecture of the first of these GPUs, such as "sm90"; empty if nvidia-smi does not tell."""
    listed = "" if not gpus else ask_driver(environ, "--query-gpu=index,compute_cap", "--format=csv,noheader")
    architectures = {
        int(index): f"sm{major}{minor}" for index, major, minor in re.findall(r"(?m)^(\d+), (\d+)\.(\d+)", listed)
    }
    return architectures.get(gpus[0].index or 0, "") if gpus else ""


def driver_version(environ: Mapping[str, str], *, proc: Path = _DRIVER_VERSION) -> str:
    """Return the version of the NVIDIA driver; empty if neither nvidia-smi nor the kernel names one."""
    told = re.match(r"(\d+(?:\.\d+)+)", ask_driver(environ, "--query-gpu=driver_version", "--format=csv,noheader"))
    match = told or re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", read_text(proc))
    return match[1] if match else ""


def read_each_other(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> bool | None:
    """Whether each of these GPUs can read the memory of the others; None if `nvidia-smi topo` does not say so."""
    if len(gpus) < 2:
        return None
    printed = _TERMINAL_CODE.sub("", ask_driver(environ, "topo", "-p2p", "r"))
    table = [words for words in map(str.split, printed.splitlines()) if words and _COLUMN.fullmatch(words[0])]
    if not table:
        return None
    header, *rows = table
    cells = {(row[0], other): cell for row in rows for other, cell in zip(header, row[1:], strict=False)}
    names = [f"GPU{gpu.index}" for gpu in gpus]
    return all(cells.get((name, other)) == "OK" for name in names for other in names if name != other)


def in_use(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each of these GPUs that other processes compute on."""
    query = ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
    processes: dict[str, list[str]] = {}
    for line in ask_driver(environ, *query).splitlines() if gpus else ():
        uuid, pid, name, used_mib = (line.strip().split(", ") + [""] * 4)[:4]
        held = f", {binary_bytes(int(used_mib) << 20)}" if used_mib.isdecimal() else ""
        processes.setdefault(uuid, []).append(f"{Path(name).name} (pid {pid}{held})")
    return tuple(
        f"GPU {gpu.index} ({gpu.name}) is in use by {counted(len(processes[gpu.uuid]), 'process', 'processes')}: "
        f"{', '.join(processes[gpu.uuid])}. Cases may find too little memory there, and their seconds say little."
        for gpu in gpus
        if gpu.uuid in processes
    )


def ask_driver(environ: Mapping[str, str], *words: str) -> str:
    """Return the output of nvidia-smi with these arguments; empty if it is missing or fails."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        return ""
    # It must list every GPU: what CUDA shows is decided here.
    clean = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True, env=clean
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


Device = Literal["cpu", "cuda"]

CPUINFO = Path("/proc/cpuinfo")
# x86 has a model name and flags; ARM has numbers of its maker and part, and features.
_KIND = r"^(?:vendor_id|cpu family|model|model name|flags|CPU implementer|CPU part|CPU variant|Features)\s*:.*$"
_VECTOR = re.compile(r"(avx|amx|sve)\w*|sme\d*|fma|asimd|bf16|i8mm")


def host_name() -> str:
    return socket.gethostname() or "localhost"


def cpu_kind(cpuinfo: Path = CPUINFO) -> str:
    """Model and instruction sets of the first CPU, as the kernel lists them; empty if it lists none."""
    first = read_text(cpuinfo).partition("\n\n")[0]
    return "; ".join(re.findall(_KIND, first, flags=re.MULTILINE))


def cpu_extensions(cpuinfo: Path = CPUINFO) -> str:
    """Model name of the CPU and its extensions for vectors and matrices; empty if the kernel names none."""
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
    """Return how many CPUs this process may use, by its affinity and by the quota of its control groups; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cpu_quota())))


# What makes the same machine compute differently.
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FP8_HARNESS_RANK_THREADS")


def arithmetic_limits() -> str:
    """Return the environment variables that limit CPU arithmetic, as `NAME=value NAME=value`; empty if none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in ARITHMETIC if os.environ.get(name))


# The largest world size of the tiers, and two more: a reference of one rank need not wait for the end of such a case.
# Ranks of a tiny model can share a core.
MIN_CPU_SLOTS = 10


def open_leases(
    folder: Path, device: Device, slots: int | None = None, note: Callable[[str], None] = lambda _: None
) -> Leases:
    """Return the leases of the slots of this machine, as many as `slots` or as fit, in a folder that its jobs share.

    Those of GPUs have their UUIDs, so that jobs with different CUDA_VISIBLE_DEVICES agree on who holds which one.
    `note` gets a message when they wait, which names the holders.
    """
    names = [gpu.uuid for gpu in cuda_devices(slots)] if device == "cuda" else None
    return Leases(folder / device, count_slots(device, slots), names=names, note=note)


def count_slots(device: Device, slots: int | None = None) -> int:
    """Return the number of slots: `slots`, by default a CPU rank per usable core; or at most the CUDA devices."""
    if device == "cpu":
        return slots or max(MIN_CPU_SLOTS, usable_cpus())
    return len(cuda_devices(slots))


def cuda_devices(slots: int | None = None) -> tuple[Gpu, ...]:
    """Return the CUDA devices this process may use, in the order of their CUDA indices; at most so many."""
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
        """Return the compute capability of its GPUs, (9, 0) for "sm90"; None if it is not known."""
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
