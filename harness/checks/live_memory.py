"""Is anything alive that no saved tensor explains?

Compares every storage with `expect/live_memory.py`: what is alive between forward and backward, and what outlives a
step.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.census import amount, beyond, census, largest_of
from harness.checks.check import Check
from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import LIVE_MEMORY, Expectations
from harness.expect.live_memory import LiveStorage
from harness.expect.saved_memory import NOT_OF_THIS_DEVICE, describes
from harness.matrix.case import Case
from harness.matrix.targets import OF_DTENSOR, computes_on_plain_shards
from harness.trace import RankTrace, Run
from harness.trace.counts import MOMENTS, LiveMemory
from harness.verdict import Finding

NAME = "live_memory"

_rule = Rules("live_memory")
NO_RECORD = _rule.no_record()
NO_CENSUS = _rule("no-census", Stage.MEMORY, "no record of live memory {when}")
TOO_MUCH = _rule(
    "too-much", Stage.MEMORY, "{tensors} is alive {when}, and nothing explains it", key=("when",), formula=LIVE_MEMORY
)
TOO_LITTLE = _rule(
    "too-little", Stage.MEMORY, "{purpose} is not alive {when}", key=("purpose", "when"), formula=LIVE_MEMORY
)
SCALARS = _rule("scalars", Stage.MEMORY, "wrong number of scalars alive {when}", key=("when",), formula=LIVE_MEMORY)


def check_live_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every moment the first step in which a rank has a storage alive too much or too little."""
    del case  # expectations have it
    return missing_records(run, NO_RECORD, "saved_memory") or merge_ranks(
        run, lambda trace: _unexpected(witnesses.expect, trace)
    )


def _unexpected(expect: Expectations, trace: RankTrace) -> Iterable[Finding]:
    alive = census(trace)
    for moment, when in MOMENTS.items():
        expected = expect.live_storages(rank=trace.rank, moment=moment)
        for step in range(1, expect.case.train.steps + 1):
            found = alive.get((moment, step))
            if found is None:
                yield NO_CENSUS.finding(when=when, step=step, expected="one", found="none")
                break
            finding = _difference(found, expected, expect.live_scalars(moment, step=step), step, when)
            if finding is not None:
                yield finding
                break


def _difference(
    live: LiveMemory, expected: tuple[LiveStorage, ...], scalars: int, step: int, when: str
) -> Finding | None:
    """None if the storages are the expected ones."""
    extra, lost = beyond(live.tensors, expected), beyond(expected, live.tensors)
    wanted, got = amount(expected, scalars), amount(live.tensors, live.scalars)
    if extra:
        tensors, holder = largest_of(extra)
        return TOO_MUCH.finding(step=step, tensors=tensors, holder=holder, when=when, expected=wanted, found=got)
    if lost:
        return TOO_LITTLE.finding(step=step, purpose=lost[0].purpose, when=when, expected=wanted, found=got)
    return None if live.scalars == scalars else SCALARS.finding(step=step, when=when, expected=wanted, found=got)


def _not_judged(expect: Expectations, device: str) -> str:
    if not expect.has_formulas:
        return f"no formula for the model of {expect.case.target}; see `signature`"
    if computes_on_plain_shards(expect.case.target):
        return f"{OF_DTENSOR}: {expect.case.target} saves and keeps other tensors"
    return "" if describes(device) else NOT_OF_THIS_DEVICE


CHECK = Check(
    name=NAME,
    question="Is anything alive that no saved tensor, weight, gradient or optimizer state explains?",
    blind="A tensor in the place of another of the same dtype and size; what is alive inside of an operator.",
    function=check_live_memory,
    rules=_rule.declared,
    not_judged=_not_judged,
    record="saved_memory",
    formula=LIVE_MEMORY,
)
