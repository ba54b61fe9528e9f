"""Is a misaligned FP8 matmul refused, and only a misaligned one?

A matmul whose sizes the hardware does not support must raise the named error. If it trains, something else computed it
(a fallback, an emulation, a wrong shard). Refusing an aligned matmul is just as wrong.
"""

from __future__ import annotations

import re
from functools import partial

from harness.checks.ranks import format_ranks
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.rule import Refusal
from harness.trace import Run
from harness.verdict import Finding

NAME = "alignment"

# torch's wording in the size checks of `_scaled_mm` (CUDA and meta registrations) and in its stride checks.
REFUSED = re.compile(r"divisible by 16\b|multiple of 16\b")

_finding = partial(Finding, check=NAME)


def check_alignment(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when an expected refusal is missing or has another error, or when an aligned matmul was refused."""
    refusal = witnesses.expect.refusal
    if refusal is None:
        return _aligned_but_refused(witnesses.expect, run)
    return [*_trained(run, refusal), *_other_errors(run, refusal), *_no_outcome(case, run)]


def _aligned_but_refused(expect: Expectations, run: Run) -> list[Finding]:
    refused = [failure for failure in run.causes if REFUSED.search(failure.message)]
    if not refused:
        return []
    where = format_ranks(failure.rank for failure in refused)
    message = f"refused on {where} although every GEMM is aligned"
    if not expect.has_formulas:
        message = f"refused on {where}: sizes of a converted linear, or of its tokens, are no multiples of 16 there"
    return [_finding(message=message, rank=refused[0].rank, expected="training", found=refused[0].message)]


def _trained(run: Run, refusal: Refusal) -> list[Finding]:
    trained = [trace.rank for trace in run.traces]
    if not trained:
        return []
    message = f"trained silently on {format_ranks(trained)} instead of being refused ({refusal.name}: {refusal.reason})"
    expected = f"an error matching {refusal.pattern!r}"
    return [_finding(message=message, rank=min(trained), expected=expected, found="no error")]


def _other_errors(run: Run, refusal: Refusal) -> list[Finding]:
    """Ranks that failed on their own with another error. A rank stopped because of another one may report anything.

    With uneven shards only some ranks hold a misaligned shard: the others wait for them and are stopped.
    """
    return [
        _finding(
            message=f"failed on rank {failure.rank} with another error than the refusal {refusal.name}",
            rank=failure.rank,
            expected=f"an error matching {refusal.pattern!r}",
            found=f"{failure.kind}: {failure.message}",
        )
        for failure in run.causes
        if failure.kind != "raised" or not re.search(refusal.pattern, failure.message)
    ]


def _no_outcome(case: Case, run: Run) -> list[Finding]:
    """Ranks that neither trained nor failed, and a run in which no rank failed on its own."""
    ended = {failure.rank for failure in run.failures} | {trace.rank for trace in run.traces}
    missing = set(range(case.world_size)) - ended
    if missing:
        message = f"{format_ranks(missing)} neither trained nor failed"
        return [_finding(message=message, rank=min(missing), expected=f"{case.world_size} refused ranks")]
    if run.failures and not run.causes:
        message = "no rank was refused: every failure is the consequence of another one"
        return [_finding(message=message, expected="at least 1 refused rank", found="0")]
    return []
