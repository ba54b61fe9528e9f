"""The schedule: many cases on a few threads, largest world first, ended cleanly by Ctrl-C.

Owns order, threads and interruption. It does not know how a case is run or judged: it is given `Work` for that.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from harness.result import CaseResult
from harness.spec.case import Case

# After a stop the engine kills every rank and the threads only have to notice; this bounds the wait for them.
_LAST_WORDS_S = 5.0


class Work(Protocol):
    """How one case is run. Both methods are called from several threads."""

    def run(self, case: Case) -> CaseResult | None:
        """Run one case to its result; None when stopped before there was one."""

    def stop(self) -> None:
        """Start nothing any more and kill what runs."""


class Observer(Protocol):
    """Who is told what happens, in the thread that called `run_schedule`."""

    def started(self, case: Case) -> None:
        """A thread took up this case."""

    def finished(self, result: CaseResult) -> None:
        """A case has its result."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What came out: results by position in the given cases, None for a case that was not run."""

    results: tuple[CaseResult | None, ...]
    interrupted: bool


class _Started(msgspec.Struct, frozen=True):
    position: int


class _Finished(msgspec.Struct, frozen=True):
    position: int
    result: CaseResult | None


class _Failed(msgspec.Struct, frozen=True):
    error: BaseException


class _Idle(msgspec.Struct, frozen=True):
    """A thread has nothing left to do."""


class _Interrupted(msgspec.Struct, frozen=True):
    """Ctrl-C, or SIGTERM from a CI system that cancels."""


_Event = _Started | _Finished | _Failed | _Idle | _Interrupted
_Events = queue.SimpleQueue[_Event]


def run_schedule(cases: Sequence[Case], work: Work, observer: Observer, *, jobs: int) -> Ended:
    """Run every case on `jobs` threads; Ctrl-C stops them all and keeps what has finished.

    What `work.run` raises stops the run and is raised here.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for position in sorted(range(len(cases)), key=lambda at: -cases[at].world_size):
        pending.put(position)
    events: _Events = queue.SimpleQueue()
    threads = [
        # Daemon: a thread that still waits for a device lease must not keep a stopped program alive.
        threading.Thread(target=_serve, args=(cases, pending, events, work), daemon=True)
        for _ in range(min(jobs, len(cases)))
    ]
    results: list[CaseResult | None] = [None] * len(cases)
    with _interrupts_to(events):
        for thread in threads:
            thread.start()
        stopped = _collect(cases, events, results, observer, threads=len(threads))
        if stopped is not None:
            _drain(pending)
            work.stop()
            _join(threads)
            _collect_ready(events, results, observer)
    if isinstance(stopped, _Failed):
        raise stopped.error
    return Ended(results=tuple(results), interrupted=stopped is not None)


@contextlib.contextmanager
def _interrupts_to(events: _Events) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into an event, so that it never cuts a result in two; a second one raises."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals; whoever owns it decides
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def first(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.default_int_handler)
        events.put(_Interrupted())

    for number in numbers:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, previous[number])


def _serve(cases: Sequence[Case], pending: queue.SimpleQueue[int], events: _Events, work: Work) -> None:
    """One thread: take the next case until there is none."""
    while True:
        try:
            position = pending.get_nowait()
        except queue.Empty:
            events.put(_Idle())
            return
        events.put(_Started(position))
        try:
            events.put(_Finished(position, work.run(cases[position])))
        except BaseException as error:
            events.put(_Failed(error))
            return


def _collect(
    cases: Sequence[Case],
    events: _Events,
    results: list[CaseResult | None],
    observer: Observer,
    *,
    threads: int,
) -> _Interrupted | _Failed | None:
    """Take events until every thread is idle (None) or until one that must stop the run, which is returned."""
    while threads:
        event = events.get()
        if isinstance(event, _Started):
            observer.started(cases[event.position])
        elif isinstance(event, _Finished):
            _keep(event, results, observer)
        elif isinstance(event, _Idle):
            threads -= 1
        else:
            return event
    return None


def _collect_ready(events: _Events, results: list[CaseResult | None], observer: Observer) -> None:
    """Keep the results that became ready while the run was being stopped."""
    while not events.empty():
        event = events.get()
        if isinstance(event, _Finished):
            _keep(event, results, observer)


def _keep(event: _Finished, results: list[CaseResult | None], observer: Observer) -> None:
    if event.result is not None:
        results[event.position] = event.result
        observer.finished(event.result)


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _LAST_WORDS_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _drain(pending: queue.SimpleQueue[int]) -> None:
    while True:
        try:
            pending.get_nowait()
        except queue.Empty:
            return
