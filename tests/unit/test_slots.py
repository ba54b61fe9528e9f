"""Slots of nodes: who gets them, and in which order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness.engine.cluster import SlotTable, TableClosed, check_fits, place
from harness.errors import HarnessError
from tests.worker.processes import wait_until

TOTALS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), min_size=1)


@given(TOTALS, st.data())
def test_a_placement_is_whole_where_it_can_be_and_as_narrow_as_possible(
    total: dict[str, int], data: st.DataObject
) -> None:
    free = {name: data.draw(st.integers(0, slots)) for name, slots in total.items()}
    count = data.draw(st.integers(1, sum(total.values())))
    placement = place(free, total, count)
    if placement is None:
        assert sum(free.values()) < count or sorted(free.values()) != sorted(total.values())
        return
    assert sum(placement.values()) == count
    assert all(0 < number <= free[name] for name, number in placement.items())
    sums = list(itertools.accumulate(sorted(total.values(), reverse=True)))
    assert len(placement) == 1 + sum(slots < count for slots in sums)


@given(TOTALS, st.integers(1, 40), st.booleans())
def test_what_never_fits_is_refused_and_all_else_fits_empty_nodes(
    total: dict[str, int], count: int, one_node: bool
) -> None:
    if count > (max(total.values()) if one_node else sum(total.values())):
        with pytest.raises(HarnessError, match=f"needs {count} slots"):
            check_fits(total, count, one_node=one_node)
    else:
        check_fits(total, count, one_node=one_node)
        assert place(total, total, count) is not None


@settings(max_examples=10, deadline=None, phases=[Phase.generate])  # shrinking would wait for many threads
@given(TOTALS, st.lists(st.integers(1, 32), min_size=1, max_size=8), st.data())
def test_slots_are_handed_out_in_the_order_of_asking(
    total: dict[str, int], asked: list[int], data: st.DataObject
) -> None:
    counts = [min(count, sum(total.values())) for count in asked]
    table = SlotTable(total)
    granted: list[int] = []
    holding: dict[int, Mapping[str, int]] = {}
    let_go = [threading.Event() for _ in counts]

    def hold(number: int) -> None:
        with table.taken(counts[number], one_node=False) as placement:
            holding[number] = placement
            granted.append(number)
            let_go[number].wait(10)
            del holding[number]

    with ThreadPoolExecutor(len(counts)) as threads:
        for number in range(len(counts)):
            threads.submit(hold, number)
            wait_until(lambda number=number: table.waiting + len(granted) > number)  # type: ignore[misc]
        while len(granted) < len(counts) or holding:
            for name, slots in total.items():
                assert sum(placement.get(name, 0) for placement in holding.copy().values()) <= slots
            wait_until(lambda: bool(holding))
            let_go[data.draw(st.sampled_from(sorted(holding)))].set()
            wait_until(lambda: not any(let_go[number].is_set() for number in holding.copy()))
            if len(granted) < len(counts) and not holding:
                wait_until(lambda: bool(holding) or len(granted) == len(counts))
    assert granted == list(range(len(counts)))


def test_a_lost_node_is_not_waited_for() -> None:
    table = SlotTable({"a": 2, "b": 4})
    with ExitStack() as held, ThreadPoolExecutor(2) as threads:
        held.enter_context(table.taken(3, one_node=True))
        waiting = threads.submit(lambda: held.enter_context(table.taken(4, one_node=True)))
        wait_until(lambda: table.waiting == 1)
        table.drop_node("b")
        with pytest.raises(HarnessError, match="there are only 2"):
            waiting.result(5)
    with table.taken(2, one_node=True) as placement:
        assert placement == {"a": 2}, "what was held on the lost node is not given back"


def test_closing_ends_whoever_waits() -> None:
    table = SlotTable({"a": 1})
    with ThreadPoolExecutor(1) as threads, table.taken(1, one_node=True):
        waiting = threads.submit(lambda: table.taken(1, one_node=True).__enter__())
        wait_until(lambda: table.waiting == 1)
        table.close()
        with pytest.raises(TableClosed):
            waiting.result(5)
    with pytest.raises(TableClosed), table.taken(1, one_node=True):
        pass


def test_ranks_on_cpus_are_spread_over_nodes() -> None:
    """Their slots are more than the cores."""
    free = {"a": 8, "b": 10, "c": 9}
    total = dict.fromkeys(free, 10)
    assert place(free, total, 2, spread=True) == {"b": 2}
    assert place(free, total, 2) == {"a": 2}
