"""Reasons of what cases are judged by: goldens and tolerances that changed, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from harness.checks.assembly import largest
from harness.checks.mismatch import same_number, same_numbers
from harness.evidence.golden import Golden
from harness.gate.reason import Kind, Reason, Topic
from harness.gate.sides import Pair, Sides

Goldens = Callable[[str], Golden | None]  # the golden that the project has now for a case


def changed_goldens(sides: Sides, stored: Goldens) -> Iterable[Reason]:
    """Every case whose stored golden is another one. It gates unless the golden says why it was changed."""
    for pair in sides.pairs.values():
        before, after = pair.baseline, pair.candidate
        are_stored = before.golden == after.golden == "stored" and before.golden_losses and after.golden_losses
        if are_stored and not same_numbers(before.golden_losses, after.golden_losses):
            golden = stored(pair.id)
            reason = _reason_of(golden, after.golden_losses)
            yield Reason(
                kind=Kind.GOLDEN,
                case=pair.id,
                what=f"its golden changed, largest by {_apart(before.golden_losses, after.golden_losses):.2g} nats",
                baseline=_losses(before.golden_losses),
                candidate=_losses(after.golden_losses),
                gates=not reason,
                size=_apart(before.golden_losses, after.golden_losses),
                command=after.command,
                topics=(Topic.REFERENCES,),
                details=(reason or f"no reason is known: {_unknown(sides, golden)}",),
            )


def changed_tolerances(sides: Sides) -> Iterable[Reason]:
    """Every case that may be further from its golden. A tolerance that was derived is one of this run."""
    for pair in sides.pairs.values():
        if pair.baseline.measured is None or pair.candidate.measured is None:
            continue
        before, after = pair.baseline.measured.allowed_loss, pair.candidate.measured.allowed_loss
        if before and after and not same_numbers(before, after):
            wider = largest(_ratios(before, after), empty=1.0)
            derived = "loss_vs_golden" in pair.candidate.derived or "loss_vs_golden" in pair.baseline.derived
            yield Reason(
                kind=Kind.TOLERANCE,
                case=pair.id,
                what=f"{wider:.3g} times the loss is allowed" if not wider <= 1 else "less of a loss is allowed",
                baseline=_losses(before),
                candidate=_losses(after),
                gates=not wider <= 1 and not derived,
                size=wider,
                command=pair.candidate.command,
                topics=(Topic.REFERENCES,),
                details=("derived in each run" if derived else "golden/tolerances.toml changed",),
            )


def other_references(sides: Sides) -> Iterable[Reason]:
    """Every case that lost its stored golden or its measured tolerance: what is made here shares the faults of here."""
    for pair in sides.pairs.values():
        before, after = pair.baseline, pair.candidate
        derived = [name for name in after.derived if name not in before.derived and name in before.checks]
        if before.golden == "stored" and after.golden == "run here":
            what = "its golden is run here, and was stored"
            yield _other(pair, what, before.golden, after.golden, gates=sides.same_device)
        if derived:
            what = f"its tolerance is derived now, and was measured: {', '.join(derived)}"
            yield _other(pair, what, "measured", "derived", gates=sides.same_device)


def _other(pair: Pair, what: str, before: str, after: str, *, gates: bool) -> Reason:
    return Reason(
        kind=Kind.REFERENCES,
        case=pair.id,
        what=what,
        baseline=before,
        candidate=after,
        gates=gates,
        command=pair.candidate.command,
        topics=(Topic.REFERENCES,),
    )


def _reason_of(golden: Golden | None, judged_by: tuple[float, ...]) -> str:
    """Why the golden is what it is, where it is the one that the candidate was judged by; else empty."""
    if golden is None or not same_numbers(golden.losses, judged_by):
        return ""
    made = golden.provenance
    return f"reason: {made.reason} ({made.created[:10]}, commit {made.commit[:12]})" if made.reason else ""


def _unknown(sides: Sides, golden: Golden | None) -> str:
    before, after = sides.environments
    if before.commit and (before.commit, before.changes) == (after.commit, after.changes):
        return f"both runs are of commit {before.commit[:12]}, in which it cannot change"
    return "no golden is stored now" if golden is None else "the golden that is stored now is another one"


def _apart(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    steps = zip(first, second, strict=False)
    return largest((abs(a - b) for a, b in steps if not same_number(a, b)), empty=0.0)


def _ratios(before: tuple[float, ...], after: tuple[float, ...]) -> list[float]:
    return [
        new / old if old else math.inf for old, new in zip(before, after, strict=False) if not same_number(old, new)
    ]


def _losses(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.6g}" for value in values)
