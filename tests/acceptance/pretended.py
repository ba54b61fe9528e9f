"""The command line on a system that it is not on: `python pretended.py darwin|windows|old [["list", "smoke"], …]`.

Takes away what that system lacks before anything of the harness is imported: modules, functions of `os` and `signal`,
/proc and its like, system calls. "old" is a Linux whose kernel knows no new system call. Prints the exit code and the
output of each command as JSON.
"""

import builtins
import ctypes
import errno
import io
import json
import os
import platform
import signal
import subprocess  # noqa: F401
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

# What asks for the system when it is imported, and is made for the real one here.
import click  # noqa: F401
import numpy  # noqa: F401
import rich.console  # noqa: F401

_LINUX_ALONE = {
    os: "sched_getaffinity pidfd_open memfd_create eventfd posix_fadvise process_cpu_count",
    signal: "pidfd_send_signal",
}
_UNIX_ALONE = {
    os: "fork getuid geteuid killpg setsid getpgid waitid wait4 WNOWAIT P_ALL WEXITED getloadavg uname sysconf "
    "mkfifo statvfs fchmod pread pwrite O_CLOEXEC O_NONBLOCK O_ASYNC",
    signal: "SIGKILL SIGHUP SIGQUIT SIGBUS SIGXCPU SIGUSR1 SIGUSR2 SIGSTOP SIGCONT SIGCHLD SIGIO SIGALRM",
}
_SYSTEMS = {
    "darwin": ("Darwin", "arm64", [_LINUX_ALONE], ()),
    "old": ("Linux", "x86_64", [], ()),
    "windows": ("Windows", "AMD64", [_LINUX_ALONE, _UNIX_ALONE], ("fcntl", "resource", "pwd", "grp", "termios")),
}
_KERNEL_FILES = ("/proc", "/sys")


def pretend(system: str) -> None:
    name, machine, lacking, modules = _SYSTEMS[system]
    for words in lacking:
        for module, attributes in words.items():
            for attribute in attributes.split():
                if hasattr(module, attribute):  # Python 3.13 has more of them
                    delattr(module, attribute)
    platform.system, platform.machine = lambda: name, lambda: machine
    ctypes.CDLL = _library  # type: ignore[assignment,misc]
    if system == "old":
        return
    sys.platform = {"windows": "win32"}.get(system, system)
    builtins.__import__ = _without(modules, builtins.__import__)
    for module in (builtins, io, os):
        module.open = _hidden(module.open)  # type: ignore[attr-defined]
    for function in ("stat", "lstat", "listdir", "scandir", "readlink"):
        setattr(os, function, _hidden(getattr(os, function)))


def _without(modules: tuple[str, ...], real: Callable[..., Any]) -> Callable[..., Any]:
    """Imports as `real` does; the harness finds none of these modules."""

    def imported(name: str, globals: Any = None, *rest: Any, **options: Any) -> Any:
        if name in modules and (globals or {}).get("__name__", "").startswith("harness"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, *rest, **options)

    return imported


def _hidden(real: Callable[..., Any]) -> Callable[..., Any]:
    """Does as `real`; finds none of the files that the kernel of Linux makes."""

    def guarded(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_KERNEL_FILES):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return real(path, *arguments, **options)

    return guarded


def _library(*_: Any, **__: Any) -> Any:
    """The C library, none of whose calls this kernel knows."""

    class Library:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_: ctypes.set_errno(errno.ENOSYS) or -1

    return Library()


def answer(words: list[str]) -> tuple[int, str, str]:
    from harness.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return code, *(stream.buffer.getvalue().decode("cp1252") for stream in (out, err))


if __name__ == "__main__":
    _, system, commands = sys.argv
    warnings.filterwarnings("error", category=EncodingWarning, module="harness")
    pretend(system)
    sys.stdout.write(json.dumps([answer(words) for words in json.loads(commands)]))
