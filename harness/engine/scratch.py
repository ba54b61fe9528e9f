"""A temporary folder for what jobs write: removed with its run, or by the next run when its own was killed.

Its owner holds a lock on a file in it, which the kernel frees with the process. So a folder whose lock is free is
nobody's, whatever became of pids since, also between containers that share a disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "fp8-harness-jobs-"
_LOCK = "owner.lock"


class Scratch:
    """A new folder below `parent` (default: that of temporary files), until `close`. Removes those of killed runs."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unseen = self.path / f"{_LOCK}.new"
        self._lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / _LOCK)  # nobody sees it before it is locked

    def close(self) -> None:
        """Remove it with all that is in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # it is held, or another user's, or gone by now
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
