"""Process control on Linux that the standard library lacks: prctl, pidfds, /proc, and what ranks leave behind.

Can be imported on any system; `running/machine.py` asks it whether ranks can run.

A rank that is killed or calls os._exit leaves processes, and files in /dev/shm. A file belongs to a job if it appeared
during the job and one of its ranks still uses it when the job ends. Files of a rank that died earlier cannot be told
from those of other users, and are kept.
"""

import ctypes
import errno
import math
import os
import platform
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# What the driver opens for CUDA, ROCm and WSL when a process computes. NVML opens /dev/nvidiactl and /dev/nvidia0 as
# well, and is no obstacle to a fork: `torch.cuda.is_available()` asks it and leaves it open.
_DEVICES = re.compile(r"/dev/(nvidia-uvm|kfd|dxg)$")


def read_text(path: Path) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_s() -> float:
    """Return the user + system seconds of this process, and of all that it has started and waited for."""
    return sum(os.times()[:4])


MACHINES = ("x86_64", "aarch64")  # whose system calls `worker/virtual/fabric.py` knows


def foreign_system() -> str:
    """Return the system and machine if ranks cannot run on them, such as "Darwin on arm64"; else an empty string."""
    system, machine = platform.system(), platform.machine()
    return "" if system == "Linux" and machine in MACHINES else f"{system or 'an unknown system'} on {machine}"


def refused_call() -> str:
    """Return the error of a system call that ranks need and this kernel, sandbox or emulator refuses; else empty."""
    answer = ctypes.c_int()
    try:
        os.close(open_pidfd(os.getpid()))
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(answer))
    except OSError as error:
        return str(error) if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL) else ""
    return ""


def _prctl(option: int, value: int) -> None:
    _call(f"prctl({option})", "prctl", option, value, 0, 0, 0)


def _call(name: str, function: str, *arguments: int) -> int:
    """Return the result of a function of the C library. Raises OSError, with this name, where it fails."""
    result = int(getattr(ctypes.CDLL(None, use_errno=True), function)(*map(ctypes.c_long, arguments)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


# System calls, because the Pythons of uv and conda are built for kernels that have neither, so `os.pidfd_open` and
# `signal.pidfd_send_signal` are missing: https://github.com/astral-sh/python-build-standalone/issues/193. The numbers
# are the same on every machine.
_SYS_PIDFD_SEND_SIGNAL, _SYS_PIDFD_OPEN = 424, 434


def open_pidfd(pid: int) -> int:
    """Return a file descriptor of a process, which is readable once it has exited; not inherited. Raises OSError."""
    return _call("pidfd_open", "syscall", _SYS_PIDFD_OPEN, pid, 0)


def signal_pidfd(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to the process of a pidfd, whatever became of its pid. Raises OSError: ProcessLookupError, …"""
    _call("pidfd_send_signal", "syscall", _SYS_PIDFD_SEND_SIGNAL, pidfd, number, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies; exits at once if the parent is already dead."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make this process the subreaper of its descendants: orphans become its children, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def other_threads() -> tuple[str, ...]:
    """All threads of this process but the main one, sorted: those of C libraries by name, those of Python with code."""
    python = {thread.native_id: thread for thread in threading.enumerate()}
    names = []
    for task in (_PROC / "self" / "task").iterdir():
        if int(task.name) == os.getpid():
            continue
        thread = python.get(int(task.name))
        with suppress(OSError):
            names.append((task / "comm").read_text().strip() if thread is None else f"{thread.name}{_code_of(thread)}")
    return tuple(sorted(names))


def _code_of(thread: threading.Thread) -> str:
    """Where the outermost call of a thread outside of `threading` is, which shows the library that started it."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = []
    while frame is not None:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    own = [call for call in calls if not call.startswith(threading.__file__)]
    return f" ({own[-1]})" if own else ""


def command_of(pid: int) -> str:
    """Return the command line of a process without folders, at most 60 characters; "gone" when there is none."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    return textwrap.shorten(" ".join(Path(word).name for word in words), 60, placeholder=" …")


def open_devices() -> tuple[str, ...]:
    """Return the files of devices that this process computes on, sorted: it has a context there, or is about to."""
    targets = set()
    for entry in (_PROC / "self" / "fd").iterdir():
        with suppress(OSError):  # the listing's own is gone by now
            targets.add(str(entry.readlink()))
    return tuple(sorted(target for target in targets if _DEVICES.search(target)))


def open_fds() -> frozenset[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  includes the listing's own fd
    return frozenset(fd for fd in listed if _is_open(fd))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def state(pid: int) -> str:
    """Return the kernel's state letter of a process: R, S, D, T (stopped), t (traced), Z; empty when it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name: state, parent, group, session, …; empty when it is gone."""
    text = read_text(_PROC / str(pid) / "stat")
    return text.rpartition(")")[2].split()  # the process name may hold spaces and parentheses


def children() -> tuple[int, ...]:
    """Pids of the direct children of this process, including zombies, sorted. It must be single-threaded."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ()  # the usual case, without reading /proc
    me = str(os.getpid())
    return tuple(sorted(pid for pid in _pids() if (fields := _stat(pid)) and fields[1] == me))


def session(pid: int) -> int:
    """Session id of a process; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def kill_orphans(live_pids: frozenset[int]) -> tuple[tuple[int, ...], float]:
    """SIGKILL and reap the orphans that ranks left, without waiting. Call until none is left: their children follow.

    Needs `become_subreaper`. Returns the orphans found and the CPU seconds of those reaped. An orphan in the session
    of a live rank is spared: that rank may still need it.
    """
    orphans = tuple(pid for pid in children() if pid not in live_pids and session(pid) not in live_pids)
    cpu_s = 0.0
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            _, _, usage = os.wait4(pid, os.WNOHANG)
            cpu_s += usage.ru_utime + usage.ru_stime
    return orphans, cpu_s


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def kill_marked(variable: str, value: str, timeout_s: float) -> None:
    """SIGKILL all processes started with `variable=value` in their environment, until none is left or `timeout_s`.

    Descendants inherit the variable, so this reaches every process that an engine started.
    """
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        others = [pid for pid in _pids() if pid != os.getpid() and _is_marked(pid, variable, value)]
        killed = [signal_marked(pid, signal.SIGKILL, variable, value) for pid in others]
        if not any(killed):
            return
        time.sleep(0.005)


def signal_marked(pid: int, number: signal.Signals, variable: str, value: str) -> bool:
    """Signal a process that was started with `variable=value` in its environment; any other one is left alone.

    Returns True if it was signaled. `pid` may have been given to another process in the meantime.
    """
    try:
        process = open_pidfd(pid)
    except OSError:  # gone, or not a pid
        return False
    try:
        # Read after the pidfd was opened: the mark belongs to its process, or to one that came after its end.
        if not _is_marked(pid, variable, value):
            return False
        signal_pidfd(process, number)
    except OSError:
        return False
    finally:
        os.close(process)
    return True


def marked(variable: str, value: str) -> tuple[int, ...]:
    """Return the pids of all processes that were started with `variable=value` in their environment, or descend so."""
    return tuple(sorted(pid for pid in _pids() if _is_marked(pid, variable, value)))


def _is_marked(pid: int, variable: str, value: str) -> bool:
    try:
        return f"{variable}={value}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def cpu_quota(root: Path = _CGROUP, groups: Path = _PROC / "self" / "cgroup") -> float:
    """How many CPUs the control groups of this process may use, also a fraction; infinity where nothing limits them.

    `docker run --cpus` and the CPU limit of a Kubernetes pod are such quotas, and no affinity shows them. Reads both
    versions: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files and
    https://docs.kernel.org/scheduler/sched-bwc.html#management.
    """
    quotas = [math.inf]
    for line in read_text(groups).splitlines():
        _, controllers, group = line.split(":", maxsplit=2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        place = root / ("cpu" if controllers else "") / group.lstrip("/")
        # In a container the mount often begins at its own group, which has a longer path outside of it.
        for folder in (place, *place.parents):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            words = " ".join(read_text(folder / name) for name in names).split()
            if len(words) == 2 and all(map(str.isdecimal, words)):  # neither "max" nor -1
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended since boot; 0 where the kernel does not count them."""
    match = re.search(r"^oom_kill (\d+)$", read_text(_PROC / "vmstat"), flags=re.MULTILINE)
    return int(match[1]) if match else 0


_SHM = Path("/dev/shm")


def shm_files() -> frozenset[str]:
    """Return the names of the files directly in /dev/shm; empty if it does not exist."""
    with suppress(OSError):
        return frozenset(entry.name for entry in _SHM.iterdir() if not entry.is_dir())
    return frozenset()


def shm_files_used_by(pids: Iterable[int], candidates: frozenset[str]) -> frozenset[str]:
    """Return the candidates that one of these processes has open or mapped."""
    used = {path for pid in pids for path in _files_of(_PROC / str(pid))}
    return frozenset(name for name in candidates if str(_SHM / name) in used)


def _files_of(process: Path) -> Iterator[str]:
    for line in read_text(process / "maps").splitlines():
        fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
        if len(fields) == 6:
            yield fields[5]
    with suppress(OSError):
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())


def remove_shm_files(files: Iterable[str]) -> None:
    for name in files:
        with suppress(OSError):
            (_SHM / name).unlink(missing_ok=True)
