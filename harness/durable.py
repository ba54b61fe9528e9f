"""Files that survive an interruption: replaced as a whole, or grown line by line.

Owns how bytes reach the disk and the one error that a full or read-only disk turns into. It does not know what the
bytes mean.

Public names: `write_whole`, `append_line`, `DiskTrouble`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from harness.errors import HarnessError


class DiskTrouble(HarnessError):
    """The operating system refused a write: disk full, no permission, not a folder."""

    def __init__(self, path: Path, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        super().__init__(f"cannot write: {reason}", where=str(path), fix="free some space or name another path.")


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: after a crash it holds either the old bytes or all of the new ones.

    Folders are made as needed. A path that exists and is not a regular file (a pipe, a device) is written in place.
    Raises `DiskTrouble`.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, content)
    except OSError as error:
        raise DiskTrouble(path, error) from error


def append_line(path: Path, line: bytes) -> None:
    """Add one line to `path` and wait until it is on the disk. `line` holds no line break.

    A last line that an earlier interruption left without its end is closed first, so that it cannot spoil this one.
    Raises `DiskTrouble`.
    """
    assert b"\n" not in line, "one line at a time"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _write_all(file.fileno(), (b"" if _ends_clean(file.fileno()) else b"\n") + line + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskTrouble(path, error) from error


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        try:
            os.fchmod(handle, 0o644)  # mkstemp gives 0600, which a second user of a shared tree could not read
            _write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _ends_clean(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"
