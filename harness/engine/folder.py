"""The folder of one job: the names of its files, and reading the end of a log."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from harness.engine.symptoms import names_a_cause

_LOG_BYTES = 1 << 20  # of the output of a rank, searched for what names a cause
_TAIL_BYTES = 8192
_TAIL_LINES = 40
MAX_LOG_BYTES = 64 << 20  # of the output of a rank; with more, its middle is cut
KEPT_LOG_BYTES = 1 << 20  # of its beginning, where the cause of much output usually is
_DUMP_BYTES = 65536  # stacks of about 100 threads
LOG_IS_CUT = f"\nfp8-harness: output is cut here, because the log of a rank has at most {MAX_LOG_BYTES >> 20} MiB.\n"


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
        lines = read_end(self.log(rank), _LOG_BYTES).splitlines()
        causes = [line for line in lines[:-_TAIL_LINES] if names_a_cause(line)][:_TAIL_LINES]
        return "\n".join((*causes, tail(self.log(rank)))) if causes else tail(self.log(rank))

    def bound_logs(self, ranks: Iterable[int]) -> None:
        """Cut what is too long, and say so there. Ranks append, so that they go on behind it and wait for nothing."""
        for rank in ranks:
            with suppress(OSError):  # not started yet, or a full disk
                if self.log(rank).stat().st_size > MAX_LOG_BYTES:
                    os.truncate(self.log(rank), KEPT_LOG_BYTES)
                    with self.log(rank).open("a") as log:
                        log.write(LOG_IS_CUT)

    def dump_text(self, rank: int) -> str:
        return read_end(self.dump(rank), _DUMP_BYTES)


def tail(path: Path) -> str:
    """Returns the last 40 lines of a text file, at most 8 KiB; empty if it does not exist."""
    return "\n".join(read_end(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def read_end(path: Path, size: int) -> str:
    """Returns the last bytes of a text file, at most `size`; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
