"""Progress: what the terminal or a CI log shows while cases run.

A live line on a terminal (rich), a plain line per finished item elsewhere. Both say the phase, references or cases, and
about how long the rest takes, where costs are recorded.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from harness.text import counted, printable

_BAR = 12  # columns
_NOTHING: Mapping[str, float] = MappingProxyType({})

if TYPE_CHECKING:
    from rich.text import Text


class Progress(Protocol):
    """Receives the events of a run. `note` is called from any thread, the other methods from one."""

    def begin(
        self, total: int, *, references: Collection[str] = (), costs: Mapping[str, float] = _NOTHING, jobs: int = 1
    ) -> None:
        """`total` items are going to be run, so many at the same time; what was counted before is over.

        `references`: the names of those that are no case. `costs`: of those that are known, in any unit.
        """

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


class Work:
    """What is to be done, how much of it is done, and about how long the rest takes."""

    def __init__(
        self, total: int, *, references: Collection[str] = (), costs: Mapping[str, float] = _NOTHING, jobs: int = 1
    ) -> None:
        self.total, self.done = total, 0
        self._totals = {"references": len(references), "cases": total - len(references)}
        self._done = dict.fromkeys(self._totals, 0)
        self._references, self._costs, self._jobs = frozenset(references), dict(costs), jobs
        self.running: dict[str, float] = {}
        self._took_s, self._cost, self._warm_s = 0.0, 0.0, math.inf  # of items that did not wait for imports

    def start(self, name: str) -> None:
        self.running[name] = time.monotonic()

    def finish(self, name: str) -> str:
        """Return the phase that the item was of, with how many of its items are done: "references 1/6"."""
        now_s, cost = time.monotonic(), self._costs.pop(name, None)
        began_s = self.running.pop(name, now_s)
        if cost is not None and began_s >= self._warm_s:
            self._took_s, self._cost = self._took_s + now_s - began_s, self._cost + cost
        self._warm_s = min(self._warm_s, now_s)
        phase = "references" if name in self._references else "cases"
        self._done[phase], self.done = self._done[phase] + 1, self.done + 1
        return self._count(phase)

    def _count(self, phase: str) -> str:
        return f"{phase} {self._done[phase]}/{self._totals[phase]}"

    @property
    def phase(self) -> str:
        """What runs now, and its count: a reference runs before the first case that wants it."""
        return self._count("references" if self._references & self.running.keys() else "cases")

    def left(self) -> str:
        """Return the estimated time left, at the pace of this run: "~40 s left"; empty where nothing tells."""
        unfinished = self.total - self.done
        if not unfinished or len(self._costs) < unfinished or not self._cost:
            return ""
        now_s, pace = time.monotonic(), self._took_s / self._cost
        rest = (pace * cost - (now_s - self.running.get(name, now_s)) for name, cost in self._costs.items())
        left_s = sum(max(0.0, seconds) for seconds in rest) / min(self._jobs, unfinished)
        return f"~{max(10, round(left_s, -1)):.0f} s left" if left_s < 95 else f"~{left_s / 60:.0f} min left"


class PlainProgress:
    """One line per finished item, for logs. `verbose` adds a line when one starts."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._verbose = verbose
        self._lock = threading.Lock()
        self._work = Work(0)

    def begin(self, total: int, **known: Any) -> None:
        self._work = Work(total, **known)

    def started(self, name: str, ranks: int) -> None:
        self._work.start(name)
        if self._verbose:
            self.note(f"started {name} ({counted(ranks, 'rank')})")

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        count = self._work.finish(name)
        self.note(f"[{', '.join(filter(None, (count, self._work.left())))}] {line}")

    def note(self, text: str) -> None:
        with self._lock:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()


class LiveProgress:
    """A line that names running items; only remarkable ones leave one, unless `verbose`. A context manager."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self._verbose, self._work, self._began_s = verbose, Work(0), time.monotonic()
        self._console = Console(file=stream)
        self._live = Live(get_renderable=self._line, console=self._console, transient=True)

    def begin(self, total: int, **known: Any) -> None:
        self._work = Work(total, **known)

    def started(self, name: str, ranks: int) -> None:
        self._work.start(name)
        self._live.refresh()

    def finished(self, name: str, line: str, *, remarkable: bool) -> None:
        self._work.finish(name)
        if self._verbose or remarkable:
            self.note(line)
        self._live.refresh()

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def _line(self) -> Text:
        """Return the line in neutral colors: red, yellow and green are of verdicts."""
        from rich.text import Text

        width, work = self._console.width, self._work
        filled = _BAR * work.done // max(1, work.total)
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        elapsed = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        words = f" {' '.join(filter(None, (work.phase, elapsed, work.left())))} "
        names = running_text(tuple(work.running), width - _BAR - len(words) - 1)
        return Text.assemble(("━" * filled, "blue"), ("━" * (_BAR - filled), "dim"), words, names)


def running_text(names: Sequence[str], room: int) -> str:
    """Return the names in at most `room` characters: whole ones, or the first without its middle; others counted."""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown} more" if shown < len(names) else ""
        text = "  ".join(names[:shown]) + rest
        if len(text) <= room:
            return text
    kept = max(2, room - len(rest) - 1) if names else 0
    return f"{names[0][: kept - kept // 2]}…{names[0][-(kept // 2) :]}{rest}"[: max(0, room)] if names else ""


def open_progress(*, quiet: bool = False, verbose: bool = False) -> contextlib.AbstractContextManager[Progress]:
    """Return the form that fits stderr: live on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return contextlib.nullcontext(SilentProgress())
    if sys.stderr.isatty():
        return LiveProgress(sys.stderr, verbose=verbose)
    return contextlib.nullcontext(PlainProgress(sys.stderr, verbose=verbose))
