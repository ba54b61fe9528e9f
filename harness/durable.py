"""Files that survive a crash: replace one atomically, append a line to one, lock one until its holder ends.

Not the filelock package: where flock is missing it falls back to lock files that outlive their holder.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from harness.errors import HarnessError


class WriteFailed(HarnessError):
    """A write failed: disk full, no permission, not a folder."""

    def __init__(self, path: Path, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        super().__init__(f"cannot write: {reason}.", where=str(path), fix="free disk space or use another path.")


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` with `content` atomically: after a crash it holds either the old bytes or all of the new ones.

    Creates missing folders. Writes in place if `path` is not a regular file (a pipe, a device). Raises `WriteFailed`.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, content)
    except OSError as error:
        raise WriteFailed(path, error) from error


def append_line(path: Path, line: bytes) -> None:
    """Append one line to `path` and fsync. `line` must not contain a newline.

    First terminates a last line that an earlier crash left incomplete. Several processes may append at once. Raises
    `WriteFailed`.
    """
    assert b"\n" not in line, "a line must not contain a newline"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _write_all(file.fileno(), (b"" if _ends_with_newline(file) else b"\n") + line + b"\n")
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteFailed(path, error) from error


def take_lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed; the kernel closes the files of a process that is killed.

    Raises BlockingIOError when another process holds it and this one does not `wait`, and OSError on file systems and
    operating systems without flock.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no flock")
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this context with the folder. Where nothing can be locked, all may be."""
    with contextlib.ExitStack() as until_end:
        with contextlib.suppress(OSError):
            take_lock(until_end.enter_context((folder / ".lock").open("ab")), wait=True)
        yield


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        try:
            _write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        Path(name).chmod(0o644)  # mkstemp creates 0600, which other users of a shared tree could not read
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _ends_with_newline(file: IO[bytes]) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
