"""The schedule: many items of work on a few threads, largest world first, ended cleanly by Ctrl-C.

Owns order, threads and interruption. It does not know what an item is (a case, or a fault in a case) nor how it is run
or judged: it is given `Work` for that.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

# After a stop the engine kills every rank and the threads only have to notice; this bounds the wait for them.
_STOP_WAIT_S = 5.0
_SIGNAL_POLL_S = 0.1


class HasRanks(Protocol):
    """An item of work: all that the schedule asks of it is its number of ranks."""

    @property
    def world_size(self) -> int:
        """Ranks that it runs on."""


Item = TypeVar("Item", bound=HasRanks)
Result = TypeVar("Result")
_ItemT_contra = TypeVar("_ItemT_contra", bound=HasRanks, contravariant=True)
_ResultT_co = TypeVar("_ResultT_co", covariant=True)
_SeenT_contra = TypeVar("_SeenT_contra", contravariant=True)


class Work(Protocol[_ItemT_contra, _ResultT_co]):
    """How one item is run. Both methods are called from several threads."""

    def run(self, item: _ItemT_contra, /) -> _ResultT_co | None:
        """Run one item to its result; None when stopped before there was one."""

    def stop(self) -> None:
        """Start nothing any more and kill what runs."""


class Observer(Protocol[_ItemT_contra, _SeenT_contra]):
    """Receives the events of a run, in the thread that called `run_schedule`."""

    def started(self, item: _ItemT_contra, /) -> None:
        """A thread took up this item."""

    def finished(self, result: _SeenT_contra, /) -> None:
        """An item has its result."""


class Ended(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """The results by position of their items, None for an item that was not run."""

    results: tuple[Result | None, ...]
    interrupted: bool


class _Started(msgspec.Struct, frozen=True):
    position: int


class _Finished(msgspec.Struct, Generic[Result], frozen=True):
    position: int
    result: Result | None


class _Failed(msgspec.Struct, frozen=True):
    error: BaseException


class _Idle(msgspec.Struct, frozen=True):
    """A thread has nothing left to do."""


class _Interrupted(msgspec.Struct, frozen=True):
    """Ctrl-C, or SIGTERM from a CI system that cancels."""


class _Enough(msgspec.Struct, frozen=True):
    """The caller wants no more results."""


_Event = _Started | _Finished[Result] | _Failed | _Idle | _Interrupted
_Events = queue.SimpleQueue[_Event[Result]]


def run_schedule(
    items: Sequence[Item],
    work: Work[Item, Result],
    observer: Observer[Item, Result],
    *,
    jobs: int,
    enough: Callable[[], bool] = lambda: False,
) -> Ended[Result]:
    """Run every item on `jobs` threads; Ctrl-C stops them all and keeps what has finished.

    So does `enough`, which is asked after every result. What `work.run` raises stops the run and is raised here.
    """
    pending = deque(sorted(range(len(items)), key=lambda at: -items[at].world_size))  # threads may share it
    events: _Events[Result] = queue.SimpleQueue()
    threads = [
        # Daemon: a thread that still waits for a device lease must not keep a stopped program alive.
        threading.Thread(target=_serve, args=(items, pending, events, work), daemon=True)
        for _ in range(min(jobs, len(items)))
    ]
    results: list[Result | None] = [None] * len(items)
    with _interrupts_to(events):
        for thread in threads:
            thread.start()
        stopped = _collect(items, events, results, observer, threads=len(threads), enough=enough)
        if stopped is not None:
            pending.clear()
            work.stop()
            _join(threads)
            _collect_ready(events, results, observer)
    if isinstance(stopped, _Failed):
        raise stopped.error
    return Ended(results=tuple(results), interrupted=isinstance(stopped, _Interrupted))


@contextlib.contextmanager
def _interrupts_to(events: _Events[Result]) -> Iterator[None]:
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


def _serve(items: Sequence[Item], pending: deque[int], events: _Events[Result], work: Work[Item, Result]) -> None:
    while True:
        try:
            position = pending.popleft()
        except IndexError:
            events.put(_Idle())
            return
        events.put(_Started(position))
        try:
            events.put(_Finished(position, work.run(items[position])))
        except BaseException as error:
            events.put(_Failed(error))
            return


def _collect(
    items: Sequence[Item],
    events: _Events[Result],
    results: list[Result | None],
    observer: Observer[Item, Result],
    *,
    threads: int,
    enough: Callable[[], bool],
) -> _Interrupted | _Failed | _Enough | None:
    """Handle events until all threads are idle. Returns None, or the event that must stop the run."""
    while threads:
        event = _next(events)
        if isinstance(event, _Started):
            observer.started(items[event.position])
        elif isinstance(event, _Finished):
            _keep(event, results, observer)
            if enough():
                return _Enough()
        elif isinstance(event, _Idle):
            threads -= 1
        else:
            return event
    return None


def _next(events: _Events[Result]) -> _Event[Result]:
    """The next event, a signal among them.

    Python runs the handler of a signal between two steps of the main thread. One that comes just before the main thread
    blocks, or to another thread, does not end its wait: without a timeout it was handled with the next result.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=_SIGNAL_POLL_S)


def _collect_ready(events: _Events[Result], results: list[Result | None], observer: Observer[Item, Result]) -> None:
    """Keep the results that became ready while the run was being stopped."""
    while not events.empty():
        event = events.get()
        if isinstance(event, _Finished):
            _keep(event, results, observer)


def _keep(event: _Finished[Result], results: list[Result | None], observer: Observer[Item, Result]) -> None:
    if event.result is not None:
        results[event.position] = event.result
        observer.finished(event.result)


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _STOP_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
