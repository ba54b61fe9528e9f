"""Files in /dev/shm that ranks made and did not remove: a killed rank cannot, and one that leaves by os._exit does not.

Only what appeared during the job and is in use by one of its ranks when it is ended counts as theirs. What a rank made
for itself alone before it died by itself cannot be told from other people's files, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")


def names() -> frozenset[str]:
    """Names of the files directly in /dev/shm; empty where there is none."""
    with suppress(OSError):
        return frozenset(entry.name for entry in _SHM.iterdir() if not entry.is_dir())
    return frozenset()


def used_by(pids: Iterable[int], candidates: frozenset[str]) -> frozenset[str]:
    """Returns the candidates that one of these processes has mapped or open."""
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


def remove(theirs: Iterable[str]) -> None:
    """Remove these files; those that are gone already are fine."""
    for name in theirs:
        with suppress(OSError):
            (_SHM / name).unlink(missing_ok=True)
