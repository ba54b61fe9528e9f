"""Is anything more or less alive in a later step than in the second? No formula is needed for it."""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.census import amount, beyond, census, contents, largest_of
from harness.checks.check import Check
from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.counts import MOMENTS, LiveMemory
from harness.verdict import Finding

NAME = "leaks"
SETTLED = 2  # the first step that all later ones must repeat: the optimizer and precomputed scales have their state

_rule = Rules("leaks")
NO_RECORD = _rule.no_record()
NO_CENSUS = _rule("no-census", Stage.MEMORY, "no record of live memory {when}")
GROWS = _rule(
    "grows", Stage.MEMORY, "live memory grows: {tensors} is alive {when} and was not in step {settled}", key=("when",)
)
SCALARS = _rule("scalars", Stage.MEMORY, "live memory grows by scalars {when}", key=("when",))
SHRINKS = _rule("shrinks", Stage.MEMORY, "live memory shrinks {when}", key=("when",))


def check_leaks(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every moment the first step after the second that has something else alive than the second."""
    del witnesses  # it needs no other run
    return missing_records(run, NO_RECORD, "saved_memory") or merge_ranks(
        run, lambda trace: _changes(trace, steps=case.train.steps)
    )


def _changes(trace: RankTrace, *, steps: int) -> Iterable[Finding]:
    alive = census(trace)
    for moment, when in MOMENTS.items():
        first = alive.get((moment, SETTLED))
        for step in range(SETTLED, steps + 1):
            found = alive.get((moment, step))
            if first is None or found is None:
                yield NO_CENSUS.finding(when=when, step=step, expected="one", found="none")
                break
            if contents(found) != contents(first):
                yield _change(first, found, step, when)
                break


def _change(first: LiveMemory, found: LiveMemory, step: int, when: str) -> Finding:
    expected = f"{amount(first.tensors, first.scalars)}, as in step {SETTLED}"
    got = amount(found.tensors, found.scalars)
    extra = beyond(found.tensors, first.tensors)
    if extra:
        tensors, holder = largest_of(extra)
        return GROWS.finding(
            step=step, tensors=tensors, holder=holder, when=when, settled=SETTLED, expected=expected, found=got
        )
    return (SCALARS if found.scalars > first.scalars else SHRINKS).finding(
        step=step, when=when, expected=expected, found=got
    )


CHECK = Check(
    name=NAME,
    question="Does a later step have anything more or less alive than the second?",
    blind="What is too much from the first step on, which `live_memory` sees; what grows by less than a storage.",
    function=check_leaks,
    rules=_rule.declared,
    record="saved_memory",
)
