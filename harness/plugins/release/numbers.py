"""Gate reasons: numbers that changed although every check passed, whether BF16 changed too, and times.

Counts (matmuls, collectives, saved bytes, fused operators) are equal on any machine. On CPUs of one kind all other
numbers are too, so any change is named; elsewhere only a loss that moved by more than its tolerance.

Times are paired over all cases: the median ratio is the effect; the signed-rank test of Wilcoxon on the logarithms of
the ratios is the significance. Its distribution is counted for few cases and normal for many, so the same results
always give the same answer.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import NormalDist, median

import msgspec
from msgspec.structs import replace

from harness.checks.assembly import same_number, same_numbers
from harness.checks.measuring import DIGESTS, FLUSHED, GRADIENT_NORMS, LOSSES, moved
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id, parse_case_id, twin_case
from harness.plugins.release.sides import Kind, Pair, Reason, Sides, Topic
from harness.result import CaseResult, CastRange, Curve, Measured
from harness.text import counted

# Counts


def changed_counts(sides: Sides) -> Iterable[Reason]:
    """Return a reason for every case and kind of count that differs from the baseline, to the last byte."""
    for pair in sides.compared if sides.same_device else ():
        before, after = pair.baseline.measured, pair.candidate.measured
        if before is None or after is None:
            continue
        if not before.flops:  # not recorded
            after = replace(after, flops={})
        for (kind, old), (_, new) in zip(_counts(before), _counts(after), strict=True):
            names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
            if names:
                yield _changed_count(kind, pair, names, old, new)


def _counts(measured: Measured) -> tuple[tuple[Kind, Mapping[str, int]], ...]:
    wire = {
        f"{unit} of {name}": value
        for name, sent in measured.wire.items()
        for unit, value in (("bytes", sent.payload_bytes), ("calls", sent.calls))
    }
    matmuls = {
        **({} if measured.scaled_mm_calls is None else {"scaled_mm calls": measured.scaled_mm_calls}),
        **{f"FLOPs of {name}": multiplied.flops for name, multiplied in measured.flops.items()},
        **{f"calls of {name}": multiplied.calls for name, multiplied in measured.flops.items()},
    }
    saved = {} if measured.saved_bytes is None else {"bytes saved for backward": measured.saved_bytes}
    return (Kind.MATMULS, matmuls), (Kind.WIRE, wire), (Kind.SAVED_BYTES, saved), (Kind.FUSED, measured.fused)


def _changed_count(kind: Kind, pair: Pair, names: list[str], old: Mapping[str, int], new: Mapping[str, int]) -> Reason:
    """Return the number that changed most, relative to the baseline; the others are details."""

    def relative(name: str) -> float:
        before, after = old.get(name), new.get(name)
        return abs(after - before) / before if before and after is not None else 1.0

    def shown(counts: Mapping[str, int], name: str) -> str:
        return f"{counts[name]:,}" if name in counts else "none"

    largest = max(names, key=relative)
    texts = {name: f"{name}: {shown(old, name)} -> {shown(new, name)}" for name in names}
    return Reason(
        kind=kind,
        case=pair.id,
        what=texts.pop(largest),
        baseline=shown(old, largest),
        candidate=shown(new, largest),
        size=relative(largest),
        command=pair.candidate.command,
        details=tuple(texts.values()),
    )


# Numbers that moved


def moved_numbers(sides: Sides) -> Iterable[Reason]:
    """Return a reason for every case whose numbers moved. It gates where a loss moved by more than its tolerance."""
    exact = not sides.inexact_reasons
    moved_cases = {pair.id: moves for pair in sides.compared if (moves := _movements(pair, exact=exact))[0]}
    for name, (texts, topics) in moved_cases.items():
        pair = sides.pairs[name]
        share = _loss_share(pair)
        kind, why = _whose_change(pair, sides, moved_cases)
        yield Reason(
            kind=kind,
            case=name,
            what=texts[0],
            baseline=_last_loss(pair.baseline.measured),
            candidate=_last_loss(pair.candidate.measured),
            gates=share > 1,
            size=share,
            command=pair.candidate.command,
            topics=tuple(sorted(topics, key=list(Topic).index)),
            details=(*texts[1:], why),
        )


def _movements(pair: Pair, *, exact: bool) -> tuple[list[str], set[Topic]]:
    """What moved, the loss first, and its topics; no text where nothing did. Without `exact`, of the loss alone."""
    before, after = pair.baseline.measured, pair.candidate.measured
    if before is None or after is None:
        return [], set()
    share = _loss_share(pair)
    if not exact:
        return ([_loss_text(before, after, share)], {Topic.LOSSES}) if share > 1 else ([], set())
    names = moved(before, after)
    digests = [name for name in DIGESTS if name in names]
    casts = _cast_texts(before.casts, after.casts)
    texts = [
        *([_loss_text(before, after, share)] if LOSSES in names else []),
        *([_norm_text(before.curves["case"], after.curves["case"])] if GRADIENT_NORMS in names else []),
        *casts,
        *([f"other bits in {', '.join(digests)}"] if digests else []),
    ]
    return texts, {_TOPICS[name] for name in names if name in _TOPICS} | ({Topic.CASTS} if casts else set())


_TOPICS = {
    LOSSES: Topic.LOSSES,
    GRADIENT_NORMS: Topic.GRADIENTS,
    "gradients": Topic.GRADIENTS,
    "parameters": Topic.GRADIENTS,
    "casts": Topic.CASTS,
    FLUSHED: Topic.CASTS,
    "matmuls": Topic.OPERANDS,
}


def _loss_share(pair: Pair) -> float:
    """Return the largest change of a loss as a share of what the candidate is allowed in that step; infinite for NaN.

    Where no tolerance was recorded: the change in nats, and never more than 1.
    """
    before, after = pair.baseline.measured, pair.candidate.measured
    if before is None or after is None or not {"case"} <= before.curves.keys() & after.curves.keys():
        return 0.0
    steps = zip(before.curves["case"].losses, after.curves["case"].losses, strict=False)
    changes = [0.0 if same_number(old, new) else abs(new - old) for old, new in steps]
    if any(map(math.isnan, changes)):
        return math.inf
    if len(after.allowed_loss) < len(changes):
        return min(max(changes, default=0.0), 1.0)
    allowed = zip(changes, after.allowed_loss, strict=False)
    return max((change / most if most > 0 else math.inf for change, most in allowed if change), default=0.0)


def _first_change(old: tuple[float, ...], new: tuple[float, ...]) -> int:
    """Return the first step (1-based) with another value, or that only one has."""
    pairs = zip(old, new, strict=False)
    shorter = min(len(old), len(new))
    return next((step for step, pair in enumerate(pairs, 1) if not same_number(*pair)), shorter + 1)


def _loss_text(before: Measured, after: Measured, share: float) -> str:
    old, new = before.curves["case"].losses, after.curves["case"].losses
    largest = max((abs(b - a) for a, b in zip(old, new, strict=False)), default=0.0)
    allowed = f", {share:.2g} of the tolerance" if after.allowed_loss else ""
    return f"loss by up to {largest:.2g} nats{allowed}, from step {_first_change(old, new)} on"


def _norm_text(old: Curve, new: Curve) -> str:
    step = _first_change(old.grad_norms, new.grad_norms)
    before, after = (norms[step - 1] if step <= len(norms) else None for norms in (old.grad_norms, new.grad_norms))
    return f"gradient norm, step {step}: {_change(before, after)}"


def _change(before: float | None, after: float | None) -> str:
    for digits in (6, 9, 12, 17):
        shown = ["none" if number is None else f"{number:.{digits}g}" for number in (before, after)]
        if shown[0] != shown[1]:
            break
    return " -> ".join(shown)


def _cast_texts(before: tuple[CastRange, ...], after: tuple[CastRange, ...]) -> list[str]:
    """Return the first cast in time of which a number moved, and how many did."""
    old, new = ({(cast.step, cast.fqn, cast.role): cast for cast in casts} for casts in (before, after))
    others = []
    for key in [key for key in new if key in old]:
        ranges = ("amax", "scale_min", "scale_max", "saturated", "flushed")
        names = [name for name in ranges if not same_number(getattr(old[key], name), getattr(new[key], name))]
        others += [(old[key], new[key], names[0])] if names else []
    only = len(new.keys() ^ old.keys())
    texts = [f"casts that only one run has: {only}"] if only else []
    if others:
        was, cast, name = min(others, key=lambda other: other[1].step)
        first = f"{name} of {cast.fqn} {cast.role}, step {cast.step}"
        change = _change(getattr(was, name), getattr(cast, name))
        texts.append(f"{len(others)} of {len(after)} casts; first {first}: {change}")
    return texts


def _last_loss(measured: Measured | None) -> str:
    curve = None if measured is None else measured.curves.get("case")
    return f"loss {curve.losses[-1]!r}" if curve is not None and curve.losses else ""


# Whether BF16 moved, which distinguishes a change of the environment from a change of FP8


def _whose_change(pair: Pair, sides: Sides, moved_cases: Iterable[str]) -> tuple[Kind, str]:
    """Whose change it is, from the nearest BF16 run that both sides have: the BF16 counterpart, or the reference."""
    case = parse_case_id(pair.id)
    if not case.float8.enabled:
        return Kind.BF16_MOVED, "the case is BF16 itself: the environment changed"
    others = [other.id for other in sides.compared if not parse_case_id(other.id).float8.enabled]
    twin = next((name for name in twins(case) if name in others), None)
    if twin is not None:
        return _moved_kind(f"its BF16 counterpart {twin}", moved=twin in moved_cases)
    before, after = _reference_curve(pair.baseline), _reference_curve(pair.candidate)
    if before is not None and after is not None:
        return _moved_kind("the BF16 reference", moved=not same_numbers(before, after))
    if not others:
        return Kind.MOVED, "no BF16 case is in both runs: FP8 or the environment may have changed"
    count = sum(name in moved_cases for name in others)
    return (
        Kind.MOVED,
        f"no BF16 counterpart is in both runs; of {counted(len(others), 'other BF16 case')} {count} moved",
    )


def twins(case: Case) -> tuple[str, ...]:
    """Return the ids of the BF16 counterparts of a case, the nearest first: in its own dtype, and in bfloat16."""
    return case_id(replace(case, float8=Float8())), case_id(twin_case(case))


def _moved_kind(bf16: str, *, moved: bool) -> tuple[Kind, str]:
    if moved:
        return Kind.BF16_MOVED, f"{bf16} moved too: the environment changed"
    return Kind.FP8_MOVED, f"{bf16} did not move: FP8 changed"


def _reference_curve(case: CaseResult) -> tuple[float, ...] | None:
    """Return the losses of the BF16 reference of this very run; a stored golden is none."""
    return case.golden_losses if case.golden == "run here" else None


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
    """Return the times of the cases that are good on both sides at the first attempt, or None."""
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
    """Return a reason where the candidate is slower or faster. A faster one never gates."""
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
    """Yield a reason per case that `predict measure` timed on GPUs of one kind, with intervals apart. No gain gates."""
    on_gpu = sides.same_device and sides.environments[0].device not in ("", "cpu")
    for pair in sides.compared if on_gpu else ():
        numbers = (pair.baseline.measured, pair.candidate.measured)
        before, after = (None if of is None else of.speedup for of in numbers)
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
