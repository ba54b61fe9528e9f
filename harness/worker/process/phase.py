"""What this rank does at the moment, as the engine learns it: where a run hangs, it is the last thing that is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Phase:
    def __init__(self) -> None:
        self._now = ""
        self.report: Callable[[str], None] = lambda _: None

    def begin(self, phase: str) -> None:
        self._now = phase
        self.report(phase)

    @contextlib.contextmanager
    def within(self, activity: str) -> Iterator[None]:
        """While in it, `activity` goes on in the phase that began last. It is not left by an exception."""
        self.report(f"{self._now}, {activity}")
        yield
        self.report(self._now)


PHASE = Phase()  # of this process
