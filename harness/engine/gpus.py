"""The NVIDIA GPUs of this machine, which of them CUDA shows to this process, and who computes on them now.

Asks nvidia-smi, or the driver's files in /proc where that is missing. Uses neither torch nor CUDA.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.engine.linux import read_text
from harness.errors import HarnessError
from harness.plural import binary_bytes, counted

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
    index: int | None = None  # as nvidia-smi counts; None where nothing lists the GPU
    name: str = ""  # as ranks report it, such as "NVIDIA H200"; empty where nothing lists the GPU
    parts: tuple[Gpu, ...] = ()  # its MIG instances: CUDA then shows these and not the whole


def installed_gpus(environ: Mapping[str, str], *, proc: Path = _PROC) -> tuple[Gpu, ...]:
    """All GPUs of this machine in the order of nvidia-smi; none without a driver."""
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
    """The GPUs by the files of the driver, which it sorts by bus as nvidia-smi does."""
    for index, folder in enumerate(sorted(proc.iterdir()) if proc.is_dir() else ()):
        facts = _facts(folder / "information")
        uuid = facts.get("GPU UUID", "")
        known = uuid and "?" not in uuid  # not read yet from a GPU that nothing uses
        yield Gpu(uuid=uuid if known else str(index), index=index, name=facts.get("Model", ""))


def _facts(file: Path) -> Mapping[str, str]:
    lines = read_text(file).splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows a process with this environment, in the order of their CUDA indices.

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
    """True if CUDA_VISIBLE_DEVICES calls the GPU so: by its number, its UUID, or the start of that."""
    if name.isdecimal():
        return gpu.index == int(name) and not gpu.uuid.startswith("MIG-")
    return gpu.uuid.startswith(name)


def kind_of(gpus: Sequence[Gpu]) -> str:
    """The name that these GPUs share, as ranks report it. HarnessError where they have none or several."""
    kinds: dict[str, list[int | None]] = {}
    for gpu in gpus:
        kinds.setdefault(gpu.name, []).append(gpu.index)
    if len(kinds) > 1:
        listed = "; ".join(f"{name} ({', '.join(map(str, indices))})" for name, indices in kinds.items())
        first = ",".join(map(str, next(iter(kinds.values()))))
        raise HarnessError(
            f"there are different GPUs side by side: {listed}. A run uses one kind, whose goldens judge it.",
            where="--device cuda",
            fix=f"choose one kind, such as CUDA_VISIBLE_DEVICES={first}.",
        )
    if not any(kinds):
        raise HarnessError("cannot find the name of the CUDA device.", fix="see why nvidia-smi -L lists none.")
    return next(iter(kinds))


def architecture_of(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    """The architecture of the first of these GPUs, such as "sm90"; empty where nvidia-smi does not tell."""
    listed = "" if not gpus else ask_driver(environ, "--query-gpu=index,compute_cap", "--format=csv,noheader")
    architectures = {
        int(index): f"sm{major}{minor}" for index, major, minor in re.findall(r"(?m)^(\d+), (\d+)\.(\d+)", listed)
    }
    return architectures.get(gpus[0].index or 0, "") if gpus else ""


def driver_version(environ: Mapping[str, str], *, proc: Path = _DRIVER_VERSION) -> str:
    """The version of the NVIDIA driver; empty where neither nvidia-smi nor the kernel names one."""
    told = re.match(r"(\d+(?:\.\d+)+)", ask_driver(environ, "--query-gpu=driver_version", "--format=csv,noheader"))
    match = told or re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", read_text(proc))
    return match[1] if match else ""


def read_each_other(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> bool | None:
    """Whether each of these GPUs can read the memory of the others; None where `nvidia-smi topo` does not say so."""
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
    """A sentence for each of these GPUs that other processes compute on."""
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
    """The output of nvidia-smi with these arguments; empty if it is missing or fails."""
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
