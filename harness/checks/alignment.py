"""Is a misaligned FP8 matmul refused, and only a misaligned one?

A matmul whose sizes the hardware does not support must raise the named error. If it trains, something else computed it
(a fallback, an emulation, a wrong shard). Refusing an aligned matmul is just as wrong.
"""

import re
from collections.abc import Iterator
from functools import partial

from harness.checks.check import Check, Witnesses
from harness.checks.rule import Rules, Stage
from harness.matrix.case import Case
from harness.trace import Run
from harness.verdict import Finding

# torch's wording in the size checks of `_scaled_mm` (CUDA and meta registrations) and in its stride checks, and
# torchao's in its casts to MXFP8.
REFUSED = re.compile(r"divisible by (?:16\b|inner block size\b)|multiple of (?:16|32)\b")


_rule = Rules("alignment", Stage.MODEL)
REFUSED_ALIGNED = _rule("refused", "refused on {ranks} although every GEMM is aligned")
REFUSED_SIZES = _rule(
    "sizes", "refused on {ranks}: sizes of a converted linear, or of its tokens, are no multiples of {multiple} there"
)
TRAINED = _rule("trained", "trained silently on {ranks} instead of being refused ({refusal}: {reason})")
OTHER_ERROR = _rule("other-error", "failed on rank {rank} with another error than the refusal {refusal}")
NO_END = _rule("no-end", "{ranks} neither trained nor failed")
NONE_REFUSED = _rule("none-refused", "no rank was refused: every failure is the consequence of another one")


@partial(
    Check,
    declares=_rule,
    blind="A refusal by a kernel that has other limits than torch's registrations state.",
    explains_failures=True,
)
def check_alignment(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Is a misaligned FP8 matmul refused, and only a misaligned one?"""
    refusal = witnesses.expect.refusal
    if refusal is None:
        refused = [failure for failure in run.causes if REFUSED.search(failure.message)]
        if refused:
            rule = REFUSED_ALIGNED if witnesses.expect.has_formulas else REFUSED_SIZES
            ranks = [failure.rank for failure in refused]
            yield rule.finding(
                rank=ranks[0],
                ranks=ranks,
                expected="training",
                found=refused[0].message,
                multiple=case.float8.traits.multiple,
            )
        return
    expected, trained = f"an error matching {refusal.pattern!r}", [trace.rank for trace in run.traces]
    if trained:
        names = {"refusal": refusal.name, "reason": refusal.reason}
        yield TRAINED.finding(ranks=trained, expected=expected, found="no error", values=names)
    # Ranks that failed on their own with another error. A rank stopped because of another one may report anything: with
    # uneven shards only some ranks hold a misaligned shard, and the others wait for them and are stopped.
    for failure in run.causes:
        if failure.kind != "raised" or not re.search(refusal.pattern, failure.message):
            found = f"{failure.kind}: {failure.message}"
            yield OTHER_ERROR.finding(rank=failure.rank, refusal=refusal.name, expected=expected, found=found)
    yield from _no_outcome(case, run)


def _no_outcome(case: Case, run: Run) -> Iterator[Finding]:
    """Ranks that neither trained nor failed, and a run in which no rank failed on its own."""
    ended = {failure.rank for failure in run.failures} | {trace.rank for trace in run.traces}
    missing = set(range(case.world_size)) - ended
    if missing:
        yield NO_END.finding(ranks=missing, expected=f"{case.world_size} refused ranks")
    elif run.failures and not run.causes:
        yield NONE_REFUSED.finding(expected="at least 1 refused rank", found="0")
