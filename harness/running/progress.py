"""Progress: what a person or a CI log sees while cases run.

Owns the two forms: a live line on a terminal (rich), one plain line per finished case elsewhere. Both write to the
stream they are given; the final report is `report/`'s.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from harness.result import CaseResult
from harness.spec.case import Case
from harness.spec.caseid import case_id

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Who is told what happens during a run. `note` is called from any thread, the rest from one."""

    def begin(self, total: int) -> None:
        """`total` cases are going to be run."""

    def started(self, case: Case) -> None:
        """A case was taken up."""

    def finished(self, result: CaseResult) -> None:
        """A case has its result."""

    def note(self, text: str) -> None:
        """Something worth a line: a retry, missing goldens."""


class SilentProgress:
    """Says nothing: `--quiet`, and callers that report in their own way."""

    def begin(self, total: int) -> None:
        """Say nothing."""

    def started(self, case: Case) -> None:
        """Say nothing."""

    def finished(self, result: CaseResult) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


class PlainProgress:
    """One line per finished case, for logs. `verbose` adds a line when a case starts."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._verbose = verbose
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0

    def begin(self, total: int) -> None:
        """Remember how many there are."""
        self._total = total

    def started(self, case: Case) -> None:
        """Write a line when verbose."""
        if self._verbose:
            self._write(f"started {case_id(case)} ({case.world_size} ranks)")

    def finished(self, result: CaseResult) -> None:
        """Write the line of this case."""
        self._done += 1
        self._write(f"[{self._done}/{self._total}] {_finished_text(result)}")

    def note(self, text: str) -> None:
        """Write the text on a line of its own."""
        self._write(text)

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(f"{text}\n")
            self._stream.flush()


class LiveProgress:
    """A bar with the running cases; only cases that are not good stay as lines, unless `verbose`. A context manager."""

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

    def started(self, case: Case) -> None:
        """Add the case to the running ones."""
        self._running[case_id(case)] = None
        self._describe()

    def finished(self, result: CaseResult) -> None:
        """Advance the bar; leave a line when there is something to say."""
        self._running.pop(result.case_id, None)
        if self._verbose or not result.verdict.good:
            self.note(_finished_text(result))
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


def _finished_text(result: CaseResult) -> str:
    return f"{result.verdict.value:<15} {result.seconds:7.1f} s  {result.case_id}"
