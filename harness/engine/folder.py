"""The folder of one job: where its files are called what. Knows names and how to read their ends, not their meaning."""

from __future__ import annotations

from pathlib import Path

import msgspec

_TAIL_BYTES = 8192
_TAIL_LINES = 40
_DUMP_BYTES = 65536  # stacks of about 100 threads


class JobFolder(msgspec.Struct, frozen=True):
    """Names of the files that the engine keeps for one job."""

    path: Path

    def prepare(self) -> None:
        """Make the folder and its TMPDIR. Raises OSError: no space, no permission."""
        self.tmp.mkdir(parents=True, exist_ok=True)

    @property
    def tmp(self) -> Path:
        """TMPDIR of the ranks."""
        return self.path / "tmp"

    def log(self, rank: int) -> Path:
        """Stdout and stderr of a rank, in the order they were written."""
        return self.path / f"rank{rank}.log"

    def dump(self, rank: int) -> Path:
        """Where faulthandler writes the stacks of a rank, on request and on a fatal signal."""
        return self.path / f"rank{rank}.dump"

    def log_tail(self, rank: int) -> str:
        """The last lines that a rank wrote; empty when it wrote nothing."""
        return tail(self.log(rank))

    def dump_text(self, rank: int) -> str:
        """The stacks that a rank dumped; empty when it dumped none."""
        return _end(self.dump(rank), _DUMP_BYTES)


def tail(path: Path) -> str:
    """Returns the last 40 lines of a text file, at most 8 KiB; empty when there is no such file."""
    return "\n".join(_end(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def _end(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
