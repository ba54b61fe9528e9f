"""Does every rank execute the expected number of scaled matmuls? Counted calls against `expect/matmuls.py`."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.check import Check
from harness.checks.ranks import merge_ranks
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import MATMULS, Expectations
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.counts import MATMULS as STATED
from harness.verdict import Finding

NAME = "matmuls"

_rule = Rules("matmuls")
NUMBER = _rule(
    "number",
    Stage.EXECUTION,
    "wrong number of scaled matmuls at step {step}: {calls} instead of {wanted}",
    formula=MATMULS,
)


def check_matmuls(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """The first step with a wrong number of scaled matmuls; ranks with the same count share a finding."""
    fewest, most = witnesses.expect.scaled_mm_calls
    expected = f"{most}" if fewest == most else f"{fewest} to {most}"

    def first_mismatch(trace: RankTrace) -> Iterator[Finding]:
        for step in trace.steps:
            if not fewest <= step.scaled_mm_calls <= most:
                yield NUMBER.finding(
                    step=step.step,
                    expected=f"{expected} calls a step",
                    found=f"{step.scaled_mm_calls} calls",
                    calls=step.scaled_mm_calls,
                    wanted=expected,
                )
                return

    return merge_ranks(run, first_mismatch)


def _not_judged(expect: Expectations, device: str) -> str:
    del device
    if expect.has_formulas or expect.case.compile == "none":
        return ""
    return f"calls of linears are not counted in compiled runs; {expect.judged_instead(STATED)}"


CHECK = Check(
    name=NAME,
    question="Does every rank execute the expected number of scaled matmuls?",
    blind="One matmul too many that makes up for one too few; `scales` and `fp8_on` know their linears.",
    function=check_matmuls,
    rules=_rule.declared,
    not_judged=_not_judged,
    formula=MATMULS,
    needs_linears=True,
)
