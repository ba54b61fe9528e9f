"""The folder of one job: the names of its files, and reading the end of a log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.engine.symptoms import names_a_cause

_LOG_BYTES = 1 << 20  # of the output of a rank, searched for what names a cause
_TAIL_BYTES = 8192
_TAIL_LINES = 40
_DUMP_BYTES = 65536  # stacks of about 100 threads


class JobFolder(msgspec.Struct, frozen=True):
    path: Path

    def prepare(self) -> None:
        """Create the folder and its TMPDIR. Raises OSError."""
        self.tmp.mkdir(parents=True, exist_ok=True)

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    def log(self, rank: int) -> Path:
        """Stdout and stderr of a rank, interleaved as written."""
        return self.path / f"rank{rank}.log"

    def dump(self, rank: int) -> Path:
        """The stacks of a rank, which faulthandler writes on request and on a fatal signal."""
        return self.path / f"rank{rank}.dump"

    def log_tail(self, rank: int) -> str:
        """The lines of a rank's output that name a cause, then its last ones; empty if it printed none."""
        lines = _read_end(self.log(rank), _LOG_BYTES).splitlines()
        causes = [line for line in lines[:-_TAIL_LINES] if names_a_cause(line)][:_TAIL_LINES]
        return "\n".join((*causes, tail(self.log(rank)))) if causes else tail(self.log(rank))

    def dump_text(self, rank: int) -> str:
        return _read_end(self.dump(rank), _DUMP_BYTES)


def tail(path: Path) -> str:
    """Returns the last 40 lines of a text file, at most 8 KiB; empty if it does not exist."""
    return "\n".join(_read_end(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def _read_end(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
