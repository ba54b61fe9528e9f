"""Removes the files in /dev/shm that ranks leave behind: a rank that is killed or calls os._exit does not clean up.

A file belongs to a job if it appeared during the job and one of its ranks still uses it when the job ends. Files of a
rank that died earlier cannot be told from those of other users, and are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")


def names() -> frozenset[str]:
    """Names of the files directly in /dev/shm; empty where it does not exist."""
    with suppress(OSError):
        return frozenset(entry.name for entry in _SHM.iterdir() if not entry.is_dir())
    return frozenset()


def used_by(pids: Iterable[int], candidates: frozenset[str]) -> frozenset[str]:
    """Returns the candidates that one of these processes has open or mapped."""
    used = {path for pid in pids for path in _paths(Path("/proc") / str(pid))}
    return frozenset(name for name in candidates if str(_SHM / name) in used)


def _paths(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
            if len(fields) == 6:
                yield fields[5]
    with suppress(OSError):
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())


def remove(files: Iterable[str]) -> None:
    """Remove these files if they still exist."""
    for name in files:
        with suppress(OSError):
            (_SHM / name).unlink(missing_ok=True)
