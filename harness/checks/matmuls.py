"""Does every rank execute the expected number of scaled matmuls? Counted calls against `expect/matmuls.py`."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.ranks import merge_ranks
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import MATMULS
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "matmuls"


def check_matmuls(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """The first step with a wrong number of scaled matmuls; ranks with the same count share a finding."""
    fewest, most = witnesses.expect.scaled_mm_calls
    expected = f"{most}" if fewest == most else f"{fewest} to {most}"

    def first_mismatch(trace: RankTrace) -> Iterator[Finding]:
        for step in trace.steps:
            if not fewest <= step.scaled_mm_calls <= most:
                yield Finding(
                    check=NAME,
                    message=f"wrong number of scaled matmuls at step {step.step}: {step.scaled_mm_calls} instead of "
                    f"{expected}",
                    step=step.step,
                    expected=f"{expected} calls a step",
                    found=f"{step.scaled_mm_calls} calls",
                    formula=MATMULS,
                )
                return

    return merge_ranks(run, first_mismatch)
