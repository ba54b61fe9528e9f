"""Is a misaligned FP8 matmul refused, and only a misaligned one?

A matmul whose sizes the hardware cannot take must end in the named error. Training silently means that something
computed it differently (a fallback, an emulation, a wrong shard); refusing an aligned one is as wrong.
"""

from __future__ import annotations

import re

from harness.checks.ranks import rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.rules import Refusal
from harness.trace import RankFailure, Run
from harness.verdict import Finding

NAME = "alignment"

# How torch words it: the size checks of `_scaled_mm` (CUDA and meta registrations) and of its stride checks.
REFUSED = re.compile(r"divisible by 16\b|multiple of 16\b")


def check_alignment(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when an expected refusal did not happen, happened differently, or nothing called for one."""
    if witnesses.refusal is None:
        return _uncalled_for(run)
    return [*_trained(run, witnesses.refusal), *_differently(run, witnesses.refusal), *_silent(case, run)]


def _uncalled_for(run: Run) -> list[Finding]:
    refused = [failure for failure in _own(run) if REFUSED.search(failure.message)]
    if not refused:
        return []
    first = min(refused, key=lambda failure: failure.rank)
    message = f"refused on {rank_names(failure.rank for failure in refused)} although every GEMM is aligned"
    return [Finding(check=NAME, message=message, rank=first.rank, expected="training", found=first.message)]


def _trained(run: Run, refusal: Refusal) -> list[Finding]:
    trained = [trace.rank for trace in run.traces]
    if not trained:
        return []
    message = f"trained silently on {rank_names(trained)} instead of being refused ({refusal.name}: {refusal.reason})"
    expected = f"an error matching {refusal.pattern!r}"
    return [Finding(check=NAME, message=message, rank=min(trained), expected=expected, found="no error")]


def _differently(run: Run, refusal: Refusal) -> list[Finding]:
    """Every rank that failed by itself must have been refused; one that was brought down by another may say anything.

    With uneven shards only some ranks hold a misaligned piece: the others wait for them and are stopped.
    """
    return [
        Finding(
            check=NAME,
            message=f"failed on rank {failure.rank}, but not with the refusal {refusal.name}",
            rank=failure.rank,
            expected=f"an error matching {refusal.pattern!r}",
            found=f"{failure.kind}: {failure.message}",
        )
        for failure in sorted(_own(run), key=lambda failure: failure.rank)
        if failure.kind != "raised" or not re.search(refusal.pattern, failure.message)
    ]


def _silent(case: Case, run: Run) -> list[Finding]:
    """Ranks that neither trained nor failed, and a run in which nobody failed by itself."""
    heard = {failure.rank for failure in run.failures} | {trace.rank for trace in run.traces}
    silent = set(range(case.world_size)) - heard
    if silent:
        message = f"{rank_names(silent)} neither trained nor failed"
        return [Finding(check=NAME, message=message, rank=min(silent), expected=f"{case.world_size} refused ranks")]
    if run.failures and not _own(run):
        message = "every rank was brought down by another one: none was refused"
        return [Finding(check=NAME, message=message, expected="at least 1 refused rank", found="0")]
    return []


def _own(run: Run) -> list[RankFailure]:
    return [failure for failure in run.failures if not failure.consequence]
