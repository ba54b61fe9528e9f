"""Progress: what the terminal or a CI log shows while cases run.

Owns the two forms: a live line on a terminal (rich), one plain line per finished item elsewhere. Both write to the
stream they are given; the final report is `report/`'s.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from harness.text import counted, printable

_WIDE = 100  # columns from which the bar is long
_TIME_WIDTH = 7  # 0:00:12
_GAPS = 3 + 1  # between four columns, and one so that no terminal wraps
_SHORTEST = 24  # a name is not made shorter while others can be counted instead

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Receives the events of a run. `note` is called from any thread, the other methods from one."""

    def begin(self, total: int) -> None:
        """`total` items are going to be run; what was counted before is over."""

    def started(self, name: str, ranks: int) -> None:
        """An item was taken up."""

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        """An item has its result, which `line` says; a `remarkable` one is worth a line even on a terminal."""

    def note(self, text: str) -> None:
        """Something worth a line: a retry, missing goldens."""


class SilentProgress:
    """Says nothing: `--quiet`, and callers that report in their own way."""

    def _say_nothing(self, *ignored: object, **remarkable: object) -> None: ...

    begin = started = finished = note = _say_nothing


class PlainProgress:
    """One line per finished item, for logs. `verbose` adds a line when one starts."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._verbose = verbose
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0

    def begin(self, total: int) -> None:
        self._total, self._done = total, 0

    def started(self, name: str, ranks: int) -> None:
        if self._verbose:
            self._write(f"started {name} ({counted(ranks, 'rank')})")

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        self._done += 1
        self._write(f"[{self._done}/{self._total}] {line}")

    def note(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()


class LiveProgress:
    """A bar with the running items; only remarkable ones leave a line, unless `verbose`. A context manager.

    Bar, count and time always stay; the names of the running items get the room that is left.
    """

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._verbose = verbose
        self._running: dict[str, None] = {}
        self._total = 0
        console = Console(file=stream)
        self._bar_width = 24 if console.width >= _WIDE else 8
        self._rich: RichProgress = RichProgress(
            BarColumn(bar_width=self._bar_width),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._rich.add_task("", total=None)

    def begin(self, total: int) -> None:
        self._total = total
        self._rich.update(self._task, total=total, completed=0)

    def started(self, name: str, ranks: int) -> None:
        self._running[name] = None
        self._describe()

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        self._running.pop(name, None)
        if self._verbose or remarkable:
            self.note(line)
        self._rich.advance(self._task)
        self._describe()

    def note(self, text: str) -> None:
        self._rich.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._rich.stop()

    def _describe(self) -> None:
        count = 2 * len(str(self._total)) + 1
        room = self._rich.console.width - self._bar_width - count - _TIME_WIDTH - _GAPS
        self._rich.update(self._task, description=running_text(tuple(self._running), room))


def running_text(names: Sequence[str], room: int) -> str:
    """Return the names in at most `room` characters: whole, or shortened in the middle, or counted ("+2 more")."""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown} more" if shown < len(names) else ""
        rooms = _rooms(names[:shown], room - len(rest) - 2 * (shown - 1))
        if shown == 1 or all(rooms[name] >= min(_SHORTEST, len(name)) for name in names[:shown]):
            text = "  ".join(_shortened(name, rooms[name]) for name in names[:shown]) + rest
            return text if len(text) <= room else text[: max(0, room)]
    return ""


def _rooms(names: Sequence[str], room: int) -> dict[str, int]:
    """Return how many characters each name gets: what short ones leave goes to the others."""
    rooms: dict[str, int] = {}
    for done, name in enumerate(sorted(names, key=len)):
        rooms[name] = min(len(name), (room - sum(rooms.values())) // (len(names) - done))
    return rooms


def _shortened(name: str, room: int) -> str:
    """Return the name with its middle left out, so that layout and dtype stay."""
    if len(name) <= room:
        return name
    kept = max(2, room - 1)
    return f"{name[: kept - kept // 2]}…{name[-(kept // 2) :]}"


def open_progress(*, quiet: bool = False, verbose: bool = False) -> contextlib.AbstractContextManager[Progress]:
    """Return the form that fits stderr: live on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return contextlib.nullcontext(SilentProgress())
    if sys.stderr.isatty():
        return LiveProgress(sys.stderr, verbose=verbose)
    return contextlib.nullcontext(PlainProgress(sys.stderr, verbose=verbose))
