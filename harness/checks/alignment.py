"""Is a misaligned FP8 matmul refused, and only a misaligned one?

A matmul whose sizes the hardware does not support must raise the named error. If it trains, something else computed it
(a fallback, an emulation, a wrong shard). Refusing an aligned matmul is just as wrong.
"""

from __future__ import annotations

import re

from harness.checks.check import Check
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.rules import Refusal
from harness.trace import Run
from harness.verdict import Finding

NAME = "alignment"

# torch's wording in the size checks of `_scaled_mm` (CUDA and meta registrations) and in its stride checks.
REFUSED = re.compile(r"divisible by 16\b|multiple of 16\b")


_rule = Rules("alignment")
REFUSED_ALIGNED = _rule("refused", Stage.MODEL, "refused on {ranks} although every GEMM is aligned")
REFUSED_SIZES = _rule(
    "sizes",
    Stage.MODEL,
    "refused on {ranks}: sizes of a converted linear, or of its tokens, are no multiples of 16 there",
)
TRAINED = _rule("trained", Stage.MODEL, "trained silently on {ranks} instead of being refused ({refusal}: {reason})")
OTHER_ERROR = _rule("other-error", Stage.MODEL, "failed on rank {rank} with another error than the refusal {refusal}")
NO_END = _rule("no-end", Stage.MODEL, "{ranks} neither trained nor failed")
NONE_REFUSED = _rule(
    "none-refused", Stage.MODEL, "no rank was refused: every failure is the consequence of another one"
)


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
    rule = REFUSED_ALIGNED if expect.has_formulas else REFUSED_SIZES
    ranks = [failure.rank for failure in refused]
    return [rule.finding(rank=ranks[0], ranks=ranks, expected="training", found=refused[0].message)]


def _trained(run: Run, refusal: Refusal) -> list[Finding]:
    trained = [trace.rank for trace in run.traces]
    if not trained:
        return []
    expected = f"an error matching {refusal.pattern!r}"
    names = {"refusal": refusal.name, "reason": refusal.reason}
    return [TRAINED.finding(ranks=trained, expected=expected, found="no error", values=names)]


def _other_errors(run: Run, refusal: Refusal) -> list[Finding]:
    """Ranks that failed on their own with another error. A rank stopped because of another one may report anything.

    With uneven shards only some ranks hold a misaligned shard: the others wait for them and are stopped.
    """
    return [
        OTHER_ERROR.finding(
            rank=failure.rank,
            refusal=refusal.name,
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
        return [NO_END.finding(ranks=missing, expected=f"{case.world_size} refused ranks")]
    if run.failures and not run.causes:
        return [NONE_REFUSED.finding(expected="at least 1 refused rank", found="0")]
    return []


CHECK = Check(
    name=NAME,
    question="Is a misaligned FP8 matmul refused, and only a misaligned one?",
    blind="A refusal by a kernel that has other limits than torch's registrations state.",
    function=check_alignment,
    rules=_rule.declared,
    explains_failures=True,
)
