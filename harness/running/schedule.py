"""The schedule: many items of work on a few threads, the largest first, ended cleanly by Ctrl-C.

Owns order, threads and interruption. It does not know what an item is (a case, or a fault in a case) nor how it is run,
checked and told of.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

# After a stop the engine kills every rank and the threads only have to notice; this bounds the wait for them.
_STOP_WAIT_S = 5.0
_SIGNAL_POLL_S = 0.1


class HasRanks(Protocol):
    """An item of work: all that the schedule asks of it is its number of ranks."""

    @property
    def world_size(self) -> int:
        """Return the ranks that it runs on."""


Item = TypeVar("Item", bound=HasRanks)
Result = TypeVar("Result")


class Ended(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """The results by position of their items, None for an item that was not run."""

    results: tuple[Result | None, ...]
    interrupted: bool


class _Event(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """What a thread did with the item at a position, or that it is idle: nothing is left to do.

    `interrupted`: Ctrl-C, SIGTERM from a CI system that cancels, or SIGHUP when the terminal is closed.
    """

    what: Literal["started", "finished", "failed", "idle", "interrupted"]
    position: int = -1
    result: Result | None = None
    error: BaseException | None = None


_Events = queue.SimpleQueue[_Event[Result]]


def _ranks(item: HasRanks) -> float:
    return item.world_size


def run_schedule(  # noqa: PLR0913  what is run, in which order, and who is told
    items: Sequence[Item],
    run: Callable[[Item], Result | None],
    stop: Callable[[], None],
    *,
    jobs: int,
    started: Callable[[Item], None],
    finished: Callable[[Result], bool],
    size: Callable[[Item], float] = _ranks,
) -> Ended[Result]:
    """Run every item on `jobs` threads; Ctrl-C stops them all and keeps what has finished.

    `run` is called from these threads: an item to its result, None when stopped before there was one. What it raises
    stops the schedule and is raised here. `stop` kills what runs, and `run` starts nothing after it. `started` and
    `finished` are called in this thread; `finished` returns True if no other result is wanted. `size`: the largest are
    started first, and those of one size in the order given.
    """
    pending = deque(sorted(range(len(items)), key=lambda at: -size(items[at])))  # threads may share it
    events: _Events[Result] = queue.SimpleQueue()
    threads = [
        # Daemon: a thread that still waits for a device lease must not keep a stopped program alive.
        threading.Thread(target=_serve, args=(items, pending, events, run), daemon=True)
        for _ in range(min(jobs, len(items)))
    ]
    results: list[Result | None] = [None] * len(items)

    def keep(event: _Event[Result]) -> bool:
        if event.result is None:
            return False
        results[event.position] = event.result
        return finished(event.result)

    with _interrupts_to(events):
        for thread in threads:
            thread.start()
        stopped = _stopping_event(events, len(threads), lambda event: started(items[event.position]), keep)
        if stopped is not None:
            pending.clear()
            stop()
            _join(threads)
            while not events.empty():  # what became ready meanwhile
                keep(events.get())
    if stopped is not None and stopped.error is not None:
        raise stopped.error
    return Ended(results=tuple(results), interrupted=stopped is not None and stopped.what == "interrupted")


@contextlib.contextmanager
def _interrupts_to(events: _Events[Result]) -> Iterator[None]:
    """Turn the first signal that ends a run into an event, so that it never cuts a result in two; a second one raises.

    One that is ignored stays so: `nohup` ignores SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals; whoever owns it decides
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def first(number: int, frame: object) -> None:
        for signal_number in previous:
            signal.signal(signal_number, signal.default_int_handler)
        if number == signal.SIGHUP:
            _drop_lost_outputs()
        events.put(_Event(what="interrupted"))

    for number in previous:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _drop_lost_outputs() -> None:
    """Write to nowhere what would go to a terminal that is gone: an error there would cut the results in two."""
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


def _serve(
    items: Sequence[Item], pending: deque[int], events: _Events[Result], run: Callable[[Item], Result | None]
) -> None:
    while True:
        try:
            position = pending.popleft()
        except IndexError:
            events.put(_Event(what="idle"))
            return
        events.put(_Event(what="started", position=position))
        try:
            events.put(_Event(what="finished", position=position, result=run(items[position])))
        except BaseException as error:
            events.put(_Event(what="failed", error=error))
            return


def _stopping_event(
    events: _Events[Result],
    threads: int,
    start: Callable[[_Event[Result]], None],
    keep: Callable[[_Event[Result]], bool],
) -> _Event[Result] | None:
    """Handle events until all threads are idle, or until one that must stop the schedule, which is returned."""
    while threads:
        event = _next(events)
        if event.what == "started":
            start(event)
        elif event.what == "idle":
            threads -= 1
        elif event.what != "finished" or keep(event):
            return event
    return None


def _next(events: _Events[Result]) -> _Event[Result]:
    """Return the next event, a signal among them.

    Python runs the handler of a signal between two steps of the main thread. One that comes just before the main thread
    blocks, or to another thread, does not end its wait: without a timeout it was handled with the next result.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=_SIGNAL_POLL_S)


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _STOP_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
