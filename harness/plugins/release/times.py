"""Times: paired over all cases, by effect and by significance.

The median ratio is the effect; the signed-rank test of Wilcoxon on the logarithms of the ratios is the significance.
Its distribution is counted for few cases and normal for many, so the same results always give the same answer.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import NormalDist, median

import msgspec

from harness.plugins.release.reason import Kind, Reason
from harness.plugins.release.sides import Sides
from harness.text import counted

EFFECT = 1.1  # smaller effects are not reported
LEVEL = 0.01
_COUNTED_UP_TO = 40  # cases; beyond, the normal distribution is within 1e-4


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of the candidate over those of the baseline. `p` is two-sided."""

    cases: int
    ratio: float  # the median
    p: float
    slowest: str  # the case with the largest ratio
    slowest_ratio: float
    unit: str  # "CPU seconds" or "seconds"

    @property
    def text(self) -> str:
        many = f"{self.ratio:.3g} times the {self.unit} over {counted(self.cases, 'case')}, p = {self.p:.2g}"
        return f"{many}; most in {self.slowest}: {self.slowest_ratio:.3g} times"


def times(sides: Sides) -> Times | None:
    """The times of the cases that are good on both sides at the first attempt; None where they cannot be compared."""
    before, after = sides.environments
    if (before.device, before.cpu, before.threads) != (after.device, after.cpu, after.threads) or not before.device:
        return None
    on_cpu = before.device == "cpu"
    ratios = {}
    for pair in sides.compared:
        old, new = (case.cpu_s if on_cpu else case.seconds for case in (pair.baseline, pair.candidate))
        once = len(pair.baseline.attempts) == len(pair.candidate.attempts) == 1
        if once and old > 0 and new > 0:
            ratios[pair.id] = new / old
    if not ratios:
        return None
    slowest = max(ratios, key=lambda name: (ratios[name], name))
    return Times(
        cases=len(ratios),
        ratio=median(ratios.values()),
        p=signed_rank_p([math.log(ratio) for ratio in ratios.values()]),
        slowest=slowest,
        slowest_ratio=ratios[slowest],
        unit="CPU seconds" if on_cpu else "seconds",
    )


def changed_times(case_times: Times | None, *, gates: bool) -> Iterable[Reason]:
    """A reason where the candidate is slower or faster. A faster one never gates."""
    if case_times is not None and case_times.p < LEVEL and max(case_times.ratio, 1 / case_times.ratio) >= EFFECT:
        yield Reason(
            kind=Kind.TIMES,
            what=case_times.text,
            baseline="1",
            candidate=f"{case_times.ratio:.3g}",
            gates=gates and case_times.ratio > 1,
            size=abs(math.log(case_times.ratio)),
            details=("one run of each: load on the machine looks the same; run both again, alternately",),
        )


def changed_speedups(sides: Sides) -> Iterable[Reason]:
    """A reason for every case that `predict measure` timed on GPUs of one kind, with intervals apart. No gain gates."""
    on_gpu = sides.same_device and sides.environments[0].device not in ("", "cpu")
    for pair in sides.compared if on_gpu else ():
        before, after = (
            None if case.measured is None else case.measured.speedup for case in (pair.baseline, pair.candidate)
        )
        if before is None or after is None or (before.low <= after.high and after.low <= before.high):
            continue
        yield Reason(
            kind=Kind.TIMES,
            case=pair.id,
            what=f"times as fast as BF16: {before.ratio:.3g} -> {after.ratio:.3g}, confidence intervals do not overlap",
            baseline=f"{before.low:.3g} to {before.high:.3g}",
            candidate=f"{after.low:.3g} to {after.high:.3g}",
            gates=after.ratio < before.ratio,
            size=abs(math.log(after.ratio / before.ratio)),
        )


def signed_rank_p(differences: Sequence[float]) -> float:
    """The two-sided p of the signed-rank test of Wilcoxon: how likely are such signs by chance? Zeros are left out."""
    values = sorted((value for value in differences if value), key=abs)
    if not values:
        return 1.0
    ranks: list[int] = []  # doubled: equal sizes share the mean of theirs
    for _, group in groupby(values, key=abs):
        count = len(list(group))
        ranks += [2 * len(ranks) + count + 1] * count
    above = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    extreme = max(above, sum(ranks) - above)
    if len(ranks) <= _COUNTED_UP_TO:
        ways = Counter({0: 1})  # of signs, by the sum of positive ranks
        for rank in ranks:
            ways += Counter({total + rank: count for total, count in ways.items()})
        tail = sum(count for total, count in ways.items() if total >= extreme)
        return min(1.0, 2 * tail / int(2 ** len(ranks)))
    deviation = math.sqrt(sum(rank * rank for rank in ranks)) / 2
    return min(1.0, 2 * (1 - NormalDist(sum(ranks) / 2, deviation).cdf(extreme)))
