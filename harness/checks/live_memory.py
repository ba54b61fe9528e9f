"""What is alive at a moment of a step: the storages in the record of saved memory, one by one.

Compared with `expect/live_memory.py`, and, which needs no formula, later steps with the second.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from harness.checks.check import Check, Witnesses
from harness.checks.findings import merge_ranks
from harness.checks.rule import Rules, Stage
from harness.expect.expectations import LIVE_MEMORY, Expectations
from harness.expect.live_memory import LiveStorage
from harness.expect.saved_memory import undescribed
from harness.matrix.case import Case
from harness.text import counted
from harness.trace import RankTrace, Run
from harness.trace.counts import MOMENTS, LiveMemory, LiveTensor, Moment
from harness.verdict import Finding

S = TypeVar("S", LiveTensor, LiveStorage)

_rule = Rules("live_memory", Stage.MEMORY)
NO_CENSUS = _rule("no-census", "no record of live memory {when}")
TOO_MUCH = _rule("too-much", "{tensors} is alive {when}, and nothing explains it", key=("when",), formula=LIVE_MEMORY)
TOO_LITTLE = _rule("too-little", "{purpose} is not alive {when}", key=("purpose", "when"), formula=LIVE_MEMORY)
SCALARS = _rule("scalars", "wrong number of scalars alive {when}", key=("when",), formula=LIVE_MEMORY)


def _not_described(case: Case, device: str) -> str:
    if case.layout.pp > 1:
        return "stages keep what they receive and send; `leaks` judges that it does not grow"
    return undescribed(case, device)


@partial(
    Check,
    declares=_rule,
    blind="A tensor in the place of another of the same dtype and size; what is alive inside of an operator.",
    not_judged=lambda expect, device: _not_described(expect.case, device),
    records=("saved_memory",),
    formula=LIVE_MEMORY,
)
def check_live_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is anything alive that no saved tensor, weight, gradient or optimizer state explains?"""
    return merge_ranks(run, lambda trace: _unexpected(witnesses.expect, trace))


def _unexpected(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """For every moment the first step in which a storage is alive too much or too little."""
    alive = _census(trace)
    for moment, when in MOMENTS.items():
        expected = expect.live_storages(rank=trace.rank, moment=moment)
        for step in range(1, expect.case.train.steps + 1):
            live = alive.get((moment, step))
            if live is None:
                yield NO_CENSUS.finding(when=when, step=step, expected="one", found="none")
                break
            finding = _difference(live, expected, expect.live_scalars(moment, step=step), step, when)
            if finding is not None:
                yield finding
                break


def _difference(
    live: LiveMemory, expected: tuple[LiveStorage, ...], scalars: int, step: int, when: str
) -> Finding | None:
    """None if the storages are the expected ones."""
    extra, lost = _beyond(live.tensors, expected), _beyond(expected, live.tensors)
    wanted, got = _amount(expected, scalars), _amount(live.tensors, live.scalars)
    if extra:
        tensors, holder = _largest_of(extra)
        return TOO_MUCH.finding(step=step, tensors=tensors, holder=holder, when=when, expected=wanted, found=got)
    if lost:
        return TOO_LITTLE.finding(step=step, purpose=lost[0].purpose, when=when, expected=wanted, found=got)
    return None if live.scalars == scalars else SCALARS.finding(step=step, when=when, expected=wanted, found=got)


# Leaks

SETTLED = 2  # the first step that all later ones must repeat: the optimizer and precomputed scales have their state

_leaks = Rules("leaks", Stage.MEMORY)
NO_CENSUS_OF_LEAKS = _leaks("no-census", "no record of live memory {when}")
GROWS = _leaks("grows", "live memory grows: {tensors} is alive {when} and was not in step {settled}", key=("when",))
MORE_SCALARS = _leaks("scalars", "live memory grows by scalars {when}", key=("when",))
SHRINKS = _leaks("shrinks", "live memory shrinks {when}", key=("when",))


@partial(
    Check,
    declares=_leaks,
    blind="What is too much from the first step on, which `live_memory` sees; what grows by less than a storage.",
    records=("saved_memory",),
)
def check_leaks(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does a later step have anything more or less alive than the second?"""
    return merge_ranks(run, lambda trace: _changes(trace, steps=case.train.steps))


def _changes(trace: RankTrace, *, steps: int) -> Iterator[Finding]:
    """For every moment the first step that has something else alive than the second."""
    alive = _census(trace)
    for moment, when in MOMENTS.items():
        first = alive.get((moment, SETTLED))
        for step in range(SETTLED, steps + 1):
            live = alive.get((moment, step))
            if first is None or live is None:
                yield NO_CENSUS_OF_LEAKS.finding(when=when, step=step, expected="one", found="none")
                break
            if _contents(live) != _contents(first):
                yield _change(first, live, step, when)
                break


def _change(first: LiveMemory, live: LiveMemory, step: int, when: str) -> Finding:
    expected = f"{_amount(first.tensors, first.scalars)}, as in step {SETTLED}"
    got = _amount(live.tensors, live.scalars)
    extra = _beyond(live.tensors, first.tensors)
    if not extra:
        rule = MORE_SCALARS if live.scalars > first.scalars else SHRINKS
        return rule.finding(step=step, when=when, expected=expected, found=got)
    tensors, holder = _largest_of(extra)
    return GROWS.finding(
        step=step, tensors=tensors, holder=holder, when=when, settled=SETTLED, expected=expected, found=got
    )


# The census


def _census(trace: RankTrace) -> Mapping[tuple[Moment, int], LiveMemory]:
    return {(live.moment, record.step): live for record in trace.saved_memory or () for live in record.live}


def _contents(live: LiveMemory) -> tuple[int, list[tuple[str, int]]]:
    """The scalars, and dtype and bytes of all other storages: equal where as much is alive."""
    return live.scalars, sorted((tensor.dtype, tensor.nbytes) for tensor in live.tensors)


def _beyond(storages: Iterable[S], others: Iterable[LiveTensor | LiveStorage]) -> list[S]:
    """What is left when every storage is paired with another of its dtype and size."""
    unpaired = Counter((other.dtype, other.nbytes) for other in others)
    left = []
    for storage in storages:
        unpaired[storage.dtype, storage.nbytes] -= 1
        if unpaired[storage.dtype, storage.nbytes] < 0:
            left.append(storage)
    return left


def _largest_of(tensors: list[LiveTensor]) -> tuple[str, str]:
    """The largest tensor in words, and the module that holds it; of equal ones one that a module holds."""
    most = max(tensors, key=lambda tensor: (tensor.nbytes, bool(tensor.holder)))
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    holder = most.holder or "no module"
    return f"{most.dtype}{list(most.shape)} of {holder}{others}", holder


def _amount(storages: Iterable[LiveTensor | LiveStorage], scalars: int) -> str:
    return f"{sum(storage.nbytes for storage in storages)} bytes, and {counted(scalars, 'scalar')}"
