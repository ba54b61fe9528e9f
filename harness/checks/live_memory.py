"""Is anything alive that no saved tensor explains? Two checks of the census in the record of saved memory.

`live_memory` compares every storage with `expect/live_memory.py`: what is alive between forward and backward, and what
outlives a step. `leaks` needs no formula: from step 2 on, no later step may have anything more or less alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import LIVE_MEMORY, Expectations
from harness.expect.live_memory import LiveStorage
from harness.matrix.case import Case
from harness.plural import counted
from harness.trace import RankTrace, Run
from harness.trace.traffic import MOMENTS, LiveMemory, LiveTensor, Moment
from harness.verdict import Finding

NAME = "live_memory"
LEAKS = "leaks"
SETTLED = 2  # the first step that all later ones must repeat: the optimizer and precomputed scales have their state

S = TypeVar("S", LiveTensor, LiveStorage)


def check_live_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every moment the first step in which a rank has a storage alive too much or too little."""
    return missing_records(run, NAME, "saved_memory") or merge_ranks(
        run, lambda trace: _unexpected(witnesses.expect, trace)
    )


def check_leaks(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every moment the first step after the second that has something else alive than the second."""
    return missing_records(run, LEAKS, "saved_memory") or merge_ranks(
        run, lambda trace: _changes(trace, steps=case.train.steps)
    )


def _unexpected(expect: Expectations, trace: RankTrace) -> Iterable[Finding]:
    census = _census(trace)
    for moment, when in MOMENTS.items():
        expected = expect.live_storages(rank=trace.rank, moment=moment)
        for step in range(1, expect.case.train.steps + 1):
            found = census.get((moment, step))
            if found is None:
                yield _absent(NAME, step, when)
                break
            finding = _difference(found, expected, expect.live_scalars(moment, step=step), step, when)
            if finding is not None:
                yield finding
                break


def _difference(
    live: LiveMemory, expected: tuple[LiveStorage, ...], scalars: int, step: int, when: str
) -> Finding | None:
    """None if the storages are the expected ones."""
    extra, lost = _beyond(live.tensors, expected), _beyond(expected, live.tensors)
    if extra:
        message = f"{_first(extra)} is alive {when}, and nothing explains it"
    elif lost:
        message = f"{lost[0].purpose} is not alive {when}"
    elif live.scalars != scalars:
        message = f"wrong number of scalars alive {when}"
    else:
        return None
    return Finding(
        check=NAME,
        message=message,
        step=step,
        expected=_amount(expected, scalars),
        found=_amount(live.tensors, live.scalars),
        formula=LIVE_MEMORY,
    )


def _changes(trace: RankTrace, *, steps: int) -> Iterable[Finding]:
    census = _census(trace)
    for moment, when in MOMENTS.items():
        first = census.get((moment, SETTLED))
        for step in range(SETTLED, steps + 1):
            found = census.get((moment, step))
            if first is None or found is None:
                yield _absent(LEAKS, step, when)
                break
            if _contents(found) != _contents(first):
                yield Finding(
                    check=LEAKS,
                    message=_headline(first, found, when),
                    step=step,
                    expected=f"{_amount(first.tensors, first.scalars)}, as in step {SETTLED}",
                    found=_amount(found.tensors, found.scalars),
                )
                break


def _headline(first: LiveMemory, found: LiveMemory, when: str) -> str:
    extra = _beyond(found.tensors, first.tensors)
    if extra:
        return f"live memory grows: {_first(extra)} is alive {when} and was not in step {SETTLED}"
    more = "grows by scalars" if found.scalars > first.scalars else "shrinks"
    return f"live memory {more} {when}"


def _beyond(storages: Iterable[S], others: Iterable[LiveTensor | LiveStorage]) -> list[S]:
    """What is left when every storage is paired with another of its dtype and size."""
    unpaired = Counter((each.dtype, each.nbytes) for each in others)
    left = []
    for each in storages:
        unpaired[each.dtype, each.nbytes] -= 1
        if unpaired[each.dtype, each.nbytes] < 0:
            left.append(each)
    return left


def _first(tensors: list[LiveTensor]) -> str:
    """The largest tensor in words; of equal ones one that a module holds."""
    largest = max(tensors, key=lambda each: (each.nbytes, bool(each.holder)))
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{largest.dtype}{list(largest.shape)} of {largest.holder or 'no module'}{others}"


def _absent(check: str, step: int, when: str) -> Finding:
    return Finding(check=check, message=f"no record of live memory {when}", step=step, expected="one", found="none")


def _census(trace: RankTrace) -> Mapping[tuple[Moment, int], LiveMemory]:
    return {(live.moment, record.step): live for record in trace.saved_memory or () for live in record.live}


def _contents(live: LiveMemory) -> tuple[int, list[tuple[str, int]]]:
    return live.scalars, sorted((tensor.dtype, tensor.nbytes) for tensor in live.tensors)


def _amount(storages: Iterable[LiveTensor | LiveStorage], scalars: int) -> str:
    return f"{sum(each.nbytes for each in storages)} bytes, and {counted(scalars, 'scalar')}"
