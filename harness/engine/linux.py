"""The kernel facts about processes that Python has no call for: prctl, threads, states, children. Knows no job."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when its parent dies; exits at once when that has already happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on orphaned descendants of this process become its children, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_names() -> tuple[str, ...]:
    """Names of all threads of this process, those made by C libraries too, sorted."""
    names = []
    for task in (_PROC / "self" / "task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return tuple(sorted(names))


def open_fds() -> frozenset[int]:
    """File descriptors that are open in this process."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  the fd of the listing is among them
    return frozenset(fd for fd in listed if _is_open(fd))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), t (traced), Z; empty when it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on: state, parent, group, session, ...; empty when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses


def children() -> tuple[int, ...]:
    """Pids of the direct children of this process, zombies too, sorted. It must be single-threaded."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ()  # the usual case, answered without reading /proc
    me = str(os.getpid())
    return tuple(sorted(pid for pid in _pids() if (fields := _stat(pid)) and fields[1] == me))


def session(pid: int) -> int:
    """Session of a process; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def kill_marked(variable: str, value: str) -> tuple[int, ...]:
    """SIGKILL every process started with `variable=value` in its environment; returns their pids.

    Descendants inherit the variable, forked ones too, so nothing that an engine started can hide from it.
    """
    needle = f"{variable}={value}".encode()
    killed = []
    for pid in _pids():
        with suppress(OSError):
            if pid != os.getpid() and needle in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return tuple(sorted(killed))


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended since boot; 0 where the kernel does not tell."""
    with suppress(OSError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
