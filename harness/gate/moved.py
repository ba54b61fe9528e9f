"""Reasons of numbers that moved although every check passed, and whether BF16 moved as well.

On CPUs of one kind the same numbers must come out, so any change is named. Elsewhere only a loss is that moved by more
than its tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.mismatch import same_number
from harness.checks.movement import DIGESTS, FLUSHED, GRADIENT_NORMS, LOSSES, moved
from harness.gate.bf16 import Bf16
from harness.gate.reason import Reason, Topic
from harness.gate.sides import Pair, Sides
from harness.measured import CastRange, Curve, Measured

_RANGES = ("amax", "scale_min", "scale_max", "saturated", "flushed")


def moved_numbers(sides: Sides) -> Iterable[Reason]:
    """A reason for every case whose numbers moved. It gates where a loss moved by more than its tolerance."""
    exact = not sides.inexact_reasons
    found = {pair.id: texts for pair in sides.compared if (texts := movements(pair, exact=exact))}
    bf16 = Bf16(sides, frozenset(found))
    for name, texts in found.items():
        pair = sides.pairs[name]
        share = loss_share(pair)
        diagnosis = bf16.diagnosis(pair)
        yield Reason(
            kind=diagnosis.kind,
            case=name,
            what=texts[0],
            baseline=_loss(pair.baseline.measured),
            candidate=_loss(pair.candidate.measured),
            gates=share > 1,
            size=share,
            command=pair.candidate.command,
            topics=_topics(pair, exact=exact),
            details=(*texts[1:], diagnosis.text),
        )


def movements(pair: Pair, *, exact: bool) -> list[str]:
    """What moved, the loss first, then the first cast and the digests; empty where nothing did."""
    before, after = pair.baseline.measured, pair.candidate.measured
    if before is None or after is None:
        return []
    share = loss_share(pair)
    if not exact:
        return [_loss_text(before, after, share)] if share > 1 else []
    names = moved(before, after)
    digests = [name for name in DIGESTS if name in names]
    return [
        *([_loss_text(before, after, share)] if LOSSES in names else []),
        *([_norm_text(before.curves["case"], after.curves["case"])] if GRADIENT_NORMS in names else []),
        *_cast_texts(before.casts, after.casts),
        *([f"other bits in {', '.join(digests)}"] if digests else []),
    ]


_TOPICS = {
    LOSSES: Topic.LOSSES,
    GRADIENT_NORMS: Topic.GRADIENTS,
    "gradients": Topic.GRADIENTS,
    "parameters": Topic.GRADIENTS,
    "casts": Topic.CASTS,
    FLUSHED: Topic.CASTS,
    "matmuls": Topic.OPERANDS,
}


def _topics(pair: Pair, *, exact: bool) -> tuple[Topic, ...]:
    """What moved of the numbers; where bits may differ, only a loss is looked at."""
    if not exact:
        return (Topic.LOSSES,)
    before, after = pair.baseline.measured, pair.candidate.measured
    casts = bool(before and after and _cast_texts(before.casts, after.casts))
    found = {_TOPICS[name] for name in moved(before, after) if name in _TOPICS} | ({Topic.CASTS} if casts else set())
    return tuple(sorted(found, key=lambda topic: topic.place))


def loss_share(pair: Pair) -> float:
    """The largest change of a loss as a share of what the candidate is allowed in that step; infinite for NaN.

    Where nothing is allowed for: the change in nats, and never more than 1.
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
    """The first step (1-based) with another value, or that only one has."""
    pairs = zip(old, new, strict=False)
    shorter = min(len(old), len(new))
    return next((step for step, each in enumerate(pairs, 1) if not same_number(*each)), shorter + 1)


def _loss_text(before: Measured, after: Measured, share: float) -> str:
    old, new = before.curves["case"].losses, after.curves["case"].losses
    largest = max((abs(b - a) for a, b in zip(old, new, strict=False)), default=0.0)
    allowed = f", {share:.2g} of what is allowed" if after.allowed_loss else ""
    return f"loss by up to {largest:.2g} nats{allowed}, from step {_first_change(old, new)} on"


def _norm_text(old: Curve, new: Curve) -> str:
    step = _first_change(old.grad_norms, new.grad_norms)
    before, after = (norms[step - 1] if step <= len(norms) else None for norms in (old.grad_norms, new.grad_norms))
    return f"gradient norm, step {step}: {_change(before, after)}"


def _change(before: float | None, after: float | None) -> str:
    """Both numbers with as many digits as tell them apart."""
    for digits in (6, 9, 12, 17):
        shown = ["none" if each is None else f"{each:.{digits}g}" for each in (before, after)]
        if shown[0] != shown[1]:
            break
    return " -> ".join(shown)


def _cast_texts(before: tuple[CastRange, ...], after: tuple[CastRange, ...]) -> list[str]:
    """The first cast in time of which a number moved, and how many did."""
    old = {(cast.step, cast.fqn, cast.role): cast for cast in before}
    others = []
    for cast in after:
        was = old.get((cast.step, cast.fqn, cast.role))
        if was is None:
            continue
        names = [name for name in _RANGES if not same_number(getattr(was, name), getattr(cast, name))]
        if names:
            others.append((was, cast, names[0]))
    only = len({(cast.step, cast.fqn, cast.role) for cast in after} ^ old.keys())
    texts = [f"casts that only one run has: {only}"] if only else []
    if others:
        was, cast, name = min(others, key=lambda each: each[1].step)
        change = _change(getattr(was, name), getattr(cast, name))
        texts.append(
            f"{len(others)} of {len(after)} casts; first {name} of {cast.fqn} {cast.role}, step {cast.step}: {change}"
        )
    return texts


def _loss(found: Measured | None) -> str:
    curve = None if found is None else found.curves.get("case")
    return f"loss {curve.losses[-1]!r}" if curve is not None and curve.losses else ""
