"""Symptoms: what the signal and the texts of a failed rank say of the cause.

Order in time misleads on GPUs: errors of a GPU are reported late, and NCCL's watchdog aborts ranks that only waited for
another one. Texts are those of torch 2.13 (CUDA, NCCL and gloo), the CUDA runtime, the driver and ROCm.
"""

import functools
import os
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from harness.engine.messages import RankOutcome
from harness.text import binary_bytes

# Signals that say nothing of what a rank computes, each with who or what sends it. Any other signal is what the code of
# the rank did and does again: SIGSEGV, SIGABRT, SIGFPE and SIGILL, SIGTRAP, SIGSYS (signal(7)).
_SENDERS = {
    "SIGKILL": "the kernel's OOM killer, the limit of a container, a scheduler or another user",
    "SIGTERM": "a scheduler, a container that is stopped, or another user",
    "SIGHUP": "a session that ended, or another user",
    "SIGINT": "another user",
    "SIGQUIT": "another user",
    "SIGXCPU": "the limit of CPU seconds of this session (`ulimit -t`)",
    "SIGBUS": "a full disk, TMPDIR or /dev/shm, or memory that fails",  # a mapped page that cannot be had
}
# Windows, where results are read and nothing runs, lacks most of them.
MACHINE_SIGNALS: Mapping[signal.Signals, str] = {
    getattr(signal, name): sender for name, sender in _SENDERS.items() if hasattr(signal, name)
}

# "machine": the GPU or its driver fails, or other processes hold its memory: says nothing of the case. "case": a fault
# of the rank itself. "timeout": it waited for others until a time-out. "peer": another process went away. "": unknown.
Kind = Literal["machine", "case", "timeout", "peer", ""]

MACHINE = "fails on this machine, not in the case"
NO_ROOM = "this machine has no memory or no disk space left"
_CUDA_TYPES = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"
_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_NCCL_PG = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"

_WORK = r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<name>\w+).*?Timeout\(ms\)=(?P<ms>\d+)\)"
_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\.\s+GPU \d+ has a total capacit?y of "
    r"(?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free\."
)
_OWN = re.compile(r"this process has ([\d.]+ \w+) memory in use")
_OTHER = re.compile(r"Process (\d+) has ([\d.]+ \w+) memory in use")
_BY_TORCH = re.compile(r"Of the allocated memory ([\d.]+ \w+) is allocated by PyTorch.*?([\d.]+ \w+) is reserved", re.S)
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CONTEXTS = 0.05  # of the memory of a GPU, at most, is taken by what no process is charged for


# What a rank raises when the host refuses memory or disk space, or has killed a process that the rank had started. The
# size is that of one tensor (c10/core/impl/alloc_cpu.cpp).
_NO_ROOM = re.compile(
    r"^_?(?:Array)?MemoryError\b|(?:you tried to allocate (?P<asked>\d+) bytes.*)?Cannot allocate memory|"
    r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|"
    r"DataLoader worker \(pid \d+\) is killed by signal: (?:Killed|Bus error|Terminated)"
)
_BAD_ALLOC = "what():  std::bad_alloc"  # from C++, before it aborts


class Symptom(NamedTuple):
    """A text and what it means for the cause. `source`: where the text is from, a file of torch or a page."""

    kind: Kind
    pattern: str
    source: str


# Of the first two kinds, the words that match are quoted. In a log, earlier ones are the cause of later ones.
SYMPTOMS = (
    Symptom("machine", r"uncorrectable (?:ECC|NVLink) error[\w ]*", _CUDA_TYPES),
    Symptom("machine", r"Invalid access of peer GPU memory over nvlink or a hardware error", _CUDA_TYPES),
    Symptom("machine", r"CUDA-capable device\(s\) is/are busy or unavailable", _CUDA_TYPES),
    Symptom("machine", r"no CUDA-capable device is detected", _CUDA_TYPES),
    Symptom("machine", r"system not yet initialized", _CUDA_TYPES),  # NVSwitch without its fabric manager
    Symptom("machine", r"CUDA driver version is insufficient for CUDA runtime version", _CUDA_TYPES),
    Symptom("machine", r"system has unsupported display driver / cuda driver combination", _CUDA_TYPES),
    Symptom("machine", r"forward compatibility was attempted on non supported HW", _CUDA_TYPES),
    Symptom("machine", r"MPS (?:client|server)[\w ]* (?:fail|not ready|connect)[\w ]*", _CUDA_TYPES),
    Symptom("machine", r"GPU is lost", _NVML),
    Symptom("machine", r"Driver/library version mismatch", _NVML),
    Symptom("machine", r"GPU has fallen off the bus", _XID),
    Symptom(
        "machine", r"CUDA unknown error - this may be due to an incorrectly set up environment", "CUDAFunctions.cpp"
    ),
    Symptom("machine", r"The NVIDIA driver on your system is too old", "torch/csrc/cuda/Module.cpp"),
    Symptom("machine", r"Found no NVIDIA driver on your system", "torch/csrc/cuda/Module.cpp"),
    Symptom("machine", r"Error while creating shared memory segment \S+", "nccl/src/misc/shmutils.cc"),
    Symptom("case", r"(?:CUDA|HIP) out of memory", "c10/cuda/CUDACachingAllocator.cpp"),
    Symptom(
        "case", r"(?:CUDA|HIP) error: [^\n]{1,120}?(?= CUDA kernel errors| Compile with| Search for|\n|$)", _CUDA_TYPES
    ),
    Symptom("case", r"Memory access fault by GPU node", "https://github.com/ROCm/ROCR-Runtime"),
    Symptom(
        "case", r"nccl(?:InvalidUsage|InvalidArgument|InternalError|SystemError|UnhandledCudaError)", "NCCLUtils.cpp"
    ),
    Symptom("timeout", rf"{_WORK} (?:ran for \d+ milliseconds|timed out)", _NCCL_PG),
    Symptom("timeout", r"watchdog got stuck for \d+ seconds", _NCCL_PG),
    Symptom("timeout", r"Timed out waiting \d+ms for (?:recv|send)|Application timeout caused pair closure", "gloo"),
    Symptom("timeout", r"timed out in monitoredBarrier", "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"),
    Symptom("peer", r"remote process exited or there was a network error|ncclRemoteError", "NCCLUtils.cpp"),
    Symptom("peer", r"NCCL communicator was aborted", "torch/csrc/distributed/c10d/NCCLUtils.cpp"),
    Symptom("peer", r"(?:Received a|Observed flight recorder) dump signal", _NCCL_PG),
    Symptom("peer", r"possible application crash on rank 0 or a network set up issue", _NCCL_PG),
    Symptom(
        "peer", r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed", "gloo, TCPStore.cpp"
    ),
)
_COMPILED = tuple((symptom.kind, re.compile(symptom.pattern)) for symptom in SYMPTOMS)

# Of the report that TORCH_NCCL_DESYNC_DEBUG=1 adds (torch/csrc/distributed/c10d/TraceUtils.h): who did not arrive.
_ABSENT = re.compile(
    r"ranks \[[\d, ]+\] are the lagging ranks|\[[\d, ]+\] joined but didn't finish collective #\d+|"
    r"\[[\d, ]+\] finished collective #\d+, but didn't join collective #\d+"
)


class Reading(NamedTuple):
    """What the texts of one rank say: the kind of the cause, and the cause in words that are equal on equal ranks."""

    kind: Kind = ""
    what: str = ""


def read(rank: RankOutcome, *, on_gpus: bool) -> Reading:
    """Return what the texts of a rank that did not return say of the cause.

    A signal that comes from outside explains any text. Where it raised, its exception counts; where it died, its output
    too. A rank that still waits is read for a broken machine only. Without GPUs nothing is a fault of a GPU, whatever a
    target prints.
    """
    if rank.signal in MACHINE_SIGNALS:
        return Reading("machine", f"killed by {signal.Signals(rank.signal).name}")
    text = rank.message if rank.status == "raised" else f"{rank.message}\n{rank.log_tail}"
    readings = sorted(_readings(text, rank, on_gpus=on_gpus), key=lambda pair: pair[0])
    if not readings:
        return Reading("machine", NO_ROOM) if _lacks_room(rank) else Reading()
    return next((reading for _, reading in readings if reading.kind == "machine"), readings[0][1])


def _lacks_room(rank: RankOutcome) -> bool:
    """Return True if the host had no room for what would fit into it."""
    if rank.status != "raised":
        return rank.status == "signaled" and _BAD_ALLOC in rank.log_tail
    match = _NO_ROOM.search(rank.message)
    return match is not None and int(match["asked"] or 0) <= _host_bytes()


@functools.cache
def _host_bytes() -> int:
    """Return the memory of this machine; nodes of a cluster are alike."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _readings(text: str, rank: RankOutcome, *, on_gpus: bool) -> Iterator[tuple[int, Reading]]:
    waits = rank.status in ("stuck", "stopped")
    for kind, pattern in _COMPILED:
        match = pattern.search(text)
        if match is None or (kind == "machine" and not on_gpus) or (kind != "machine" and waits):
            continue
        yield match.start(), _reading(kind, match, text)


def _reading(kind: Kind, match: re.Match[str], text: str) -> Reading:
    if "out of memory" in match[0]:
        return _memory(text)
    if kind == "machine":
        return Reading(kind, f"{match[0].strip()}: this {MACHINE}")
    if kind == "timeout":
        return Reading(kind, _timeout(match, text))
    return Reading(kind, match[0].strip())


def _timeout(match: re.Match[str], text: str) -> str:
    named = match.groupdict()
    cause = f"{named['name']} #{named['number']} timed out after {int(named['ms']) / 1000:g} s" if named else match[0]
    absent = list(dict.fromkeys(absence[0] for absence in _ABSENT.finditer(text)))
    return f"{cause} ({'; '.join(absent)})" if absent else cause


def _memory(text: str) -> Reading:
    """Whose memory filled the GPU: other processes', if the case alone would fit."""
    match = _MEMORY.search(text)
    if match is None:
        return Reading("case", "the GPU is out of memory; the error does not say who holds it")
    asked, total, free = (_bytes(match[name]) for name in ("asked", "total", "free"))
    own = _own_memory(text)
    others = total - free - own
    if asked <= free or own + asked > total * (1 - _CONTEXTS):
        return Reading("case", f"the case needs more than the {match['total']} of the GPU")
    pids = ", ".join(pid for pid, size in _OTHER.findall(text) if _bytes(size) != own)
    of = f" ({pids})" if pids else ""
    return Reading(
        "machine", f"other processes{of} hold {binary_bytes(int(others))} of {match['total']}: this {MACHINE}"
    )


def _own_memory(text: str) -> float:
    """Bytes that the rank itself holds. In a container its own entry has a number that it does not know as its own."""
    own = _OWN.search(text)
    if own is not None:
        return _bytes(own[1])
    by_torch = _BY_TORCH.search(text)
    held = sum(_bytes(size) for size in by_torch.groups()) if by_torch else 0.0
    return min((size for _, amount in _OTHER.findall(text) if (size := _bytes(amount)) >= held), default=held)


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _BYTES[unit]


def names_a_cause(line: str) -> bool:
    """Return True for a line of a log that names a cause; the log tail keeps such lines whatever follows them."""
    return any(pattern.search(line) for pattern in (*(pattern for _, pattern in _COMPILED), _ABSENT))


def order_of(rank: RankOutcome, reading: Reading) -> int:
    """Sort key of failures: lower is closer to the cause, and time decides only among equals.

    A broken GPU explains anything. Ranks that time out wait for a stopped one; ranks lose the connection to one that
    timed out; and what is stuck may wait for any of them.
    """
    if reading.kind == "machine":
        return 0
    if rank.status in ("stopped", "stuck"):
        return 2 if rank.status == "stopped" else 5
    return {"timeout": 3, "peer": 4}.get(reading.kind, 1)
