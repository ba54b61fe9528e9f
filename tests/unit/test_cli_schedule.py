"""The schedule: order, threads, interruption and errors, with work that needs no ranks."""

import math
import os
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.result import CaseResult
from harness.running.schedule import Ended, run_schedule
from tests.builders import make_case, make_result


class FakeWork:
    """Records what it is asked to do; at the given position it does "interrupt", "raise" or "wait" for the stop."""

    def __init__(self, then: str = "", *, at: int | None = None) -> None:
        self.order: list[Case] = []
        self.stopped = threading.Event()
        self._then, self._at = then, at

    def run(self, case: Case) -> CaseResult | None:
        self.order.append(case)
        if len(self.order) != self._at:
            return make_result(case_id(case))
        if self._then == "raise":
            raise HarnessError("planted")
        if self._then == "interrupt":
            time.sleep(0.1)  # the main thread waits for the next event by now
            # Seen by the handler of C in this thread, so the wait of the main thread goes on, as it does where the
            # signal comes just before the wait.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert self.stopped.wait(10)
        return None

    def stop(self) -> None:
        self.stopped.set()


def scheduled(
    cases: list[Case], work: FakeWork, *, jobs: int = 1, wanted: float = math.inf
) -> tuple[Ended[CaseResult], list[str]]:
    """How the schedule ended, and the ids of the results that it told of."""
    seen: list[str] = []

    def started(case: Case) -> None:
        assert threading.current_thread() is threading.main_thread()

    def finished(result: CaseResult) -> bool:
        assert threading.current_thread() is threading.main_thread()
        seen.append(result.case_id)
        return len(seen) >= wanted

    ended = run_schedule(cases, work.run, work.stop, jobs=jobs, started=started, finished=finished)
    return ended, seen


@settings(max_examples=30)  # each starts threads
@given(st.lists(st.integers(1, 8), max_size=12), st.integers(1, 4))
def test_results_keep_the_order_of_selection(sizes: list[int], jobs: int) -> None:
    cases = [make_case(dp_shard=size, seed=seed) for seed, size in enumerate(sizes)]
    ended, seen = scheduled(cases, FakeWork(), jobs=jobs)
    assert [result and result.case_id for result in ended.results] == [case_id(case) for case in cases]
    assert sorted(seen) == sorted(case_id(case) for case in cases)
    assert not ended.interrupted


def test_largest_world_first_then_order_of_selection() -> None:
    cases = [make_case(dp_shard=size, seed=seed) for seed, size in enumerate((2, 8, 4, 8))]
    work = FakeWork()
    scheduled(cases, work)
    assert [case.train.seed for case in work.order] == [1, 3, 2, 0]


def test_interrupt_keeps_what_is_finished_and_starts_nothing() -> None:
    cases = [make_case(seed=seed) for seed in range(6)]
    work = FakeWork("interrupt", at=3)
    before = signal.getsignal(signal.SIGINT)
    ended, _ = scheduled(cases, work)
    assert ended.interrupted
    assert [result is not None for result in ended.results] == [True, True, False, False, False, False]
    assert len(work.order) == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_interrupts_unless_it_is_ignored(ignored: bool) -> None:
    """`nohup` ignores it, and so does the run then."""

    class HungUp(FakeWork):
        def run(self, case: Case) -> CaseResult | None:
            os.kill(os.getpid(), signal.SIGHUP)
            assert self.stopped.wait(0.5) is not ignored
            return super().run(case)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        ended, _ = scheduled([make_case()], HungUp())
        assert ended.interrupted is not ignored
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_in_a_thread_stops_the_run_and_is_raised() -> None:
    work = FakeWork("raise", at=2)
    with pytest.raises(HarnessError, match="planted"):
        scheduled([make_case(seed=seed) for seed in range(6)], work)
    assert work.stopped.is_set()


def test_enough_results_end_the_run_without_an_interruption() -> None:
    work = FakeWork("wait", at=3)
    ended, _ = scheduled([make_case(seed=seed) for seed in range(6)], work, wanted=2)
    assert not ended.interrupted
    assert work.stopped.is_set()
    assert [result is not None for result in ended.results] == [True, True, False, False, False, False]
