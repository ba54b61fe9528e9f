"""Progress: what a person or a CI log sees while cases run.

Owns the two forms: a live line on a terminal (rich), one plain line per finished item elsewhere. Both write to the
stream they are given; the final report is `report/`'s.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from harness.words import counted

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Who is told what happens during a run. `note` is called from any thread, the rest from one."""

    def begin(self, total: int) -> None:
        """`total` items are going to be run."""

    def started(self, name: str, ranks: int) -> None:
        """An item was taken up."""

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        """An item has its result, which `line` says; a `remarkable` one is worth a line even on a terminal."""

    def note(self, text: str) -> None:
        """Something worth a line: a retry, missing goldens."""


class SilentProgress:
    """Says nothing: `--quiet`, and callers that report in their own way."""

    def begin(self, total: int) -> None:
        """Say nothing."""

    def started(self, name: str, ranks: int) -> None:
        """Say nothing."""

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


class PlainProgress:
    """One line per finished item, for logs. `verbose` adds a line when one starts."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._verbose = verbose
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0

    def begin(self, total: int) -> None:
        """Remember how many there are."""
        self._total = total

    def started(self, name: str, ranks: int) -> None:
        """Write a line when verbose."""
        if self._verbose:
            self._write(f"started {name} ({counted(ranks, 'rank')})")

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        """Write the line."""
        self._done += 1
        self._write(f"[{self._done}/{self._total}] {line}")

    def note(self, text: str) -> None:
        """Write the text on a line of its own."""
        self._write(text)

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(f"{text}\n")
            self._stream.flush()


class LiveProgress:
    """A bar with the running items; only remarkable ones leave a line, unless `verbose`. A context manager."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._verbose = verbose
        self._running: dict[str, None] = {}
        self._rich: RichProgress = RichProgress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
            transient=True,
        )
        self._task: TaskID = self._rich.add_task("", total=None)

    def begin(self, total: int) -> None:
        """Set the length of the bar."""
        self._rich.update(self._task, total=total)

    def started(self, name: str, ranks: int) -> None:
        """Add the item to the running ones."""
        self._running[name] = None
        self._describe()

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        """Advance the bar; leave a line when there is something to say."""
        self._running.pop(name, None)
        if self._verbose or remarkable:
            self.note(line)
        self._rich.advance(self._task)
        self._describe()

    def note(self, text: str) -> None:
        """Write the text above the bar."""
        self._rich.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()

    def _describe(self) -> None:
        self._rich.update(self._task, description="  ".join(self._running))


def open_progress(stream: TextIO, *, quiet: bool, verbose: bool) -> contextlib.AbstractContextManager[Progress]:
    """The form that fits the stream: live on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return contextlib.nullcontext(SilentProgress())
    if stream.isatty():
        return LiveProgress(stream, verbose=verbose)
    return contextlib.nullcontext(PlainProgress(stream, verbose=verbose))
