"""Does a cast lose as many values as on one rank? The share that is flushed to zero, and the share that saturates.

A cast to float8 loses small values. How many follows from the values and their scale alone, whatever the layout: every
shard of a tensor is cast with the scale of the tensor. So the shares over all ranks are those of the solo witness,
which replays the data-parallel ranks one after another. Results keep them for every operand, linear and step.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from harness.checks.check import Check, Witnesses, finished, unfinished
from harness.checks.rule import Rule, Rules, Stage
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.numerics import Numerics, activations_differ, clips_by_a_rounded_norm, sums_in_order
from harness.text import format_numbers
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, CastShare
from harness.verdict import Finding

# How far a share may be from the single-rank one. Exact: the same values are cast with the same scales. Replicas: sums
# of gradients have another order, so single weights of later steps are rounded otherwise; measured over HSDP: 0.
# Rounded: where the scale of a row moves by a power of two, so does what the row loses; measured in 1 of 8 cases of
# HSDP: 1e-3. Under TP all values differ by the rounding of earlier sums; measured over 12 cases of 5 steps: 3e-4, and
# 2e-3 where scales moved. Scales that are rounded down let the largest values of a quarter of all blocks saturate, and
# a block may come to that or leave it: 0.008 in 1 of 20 cases under TP.
EXACT, REPLICAS, ROUNDED, ROUNDED_DOWN = 1e-12, 1e-4, 0.006, 0.016
# ROUNDED and ROUNDED_DOWN were measured over so many steps. Later, rounding has driven two runs too far apart.
MEASURED_STEPS = 5

_rule = Rules("underflow", Stage.OPERAND, located=True)
NO_REFERENCE = _rule.no_witness()
NOTHING_COMPARED = _rule(
    "nothing-compared",
    "no cast is one that the single-rank reference has too",
    stage=Stage.RUN,
    located=False,
    judged=False,
)
_MOVED = (
    "of {operand} of {module}, {found:.3g} of all values {become} instead of {expected:.3g} on one rank: "
    "{distance:.2g} apart, {allowed:.2g} allowed ({count} of {compared} operands)"
)
FLUSHED = _rule("flushed", _MOVED, numeric=True)
SATURATED = _rule("saturated", _MOVED, numeric=True)


class Lost(NamedTuple):
    """The share of values that casts of one operand lost, here and on one rank."""

    cast: CastShare
    found: float
    expected: float

    @property
    def distance(self) -> float:
        return abs(self.found - self.expected)


def _partly(expect: Expectations, device: str) -> str:
    steps, judged = expect.case.train.steps, judged_steps(expect.case, expect.numerics)
    later = [*range(judged + 1, steps + 1)]
    return f"{format_numbers('step', later)}: the limit was measured over {judged} steps" if later else ""


@partial(
    Check,
    declares=_rule,
    partly=_partly,
    blind="A recipe that loses as much on one rank; casts in compiled blocks, of which nobody records what they lose.",
    not_judged=lambda expect, device: "" if expect.case.float8.enabled else "nothing is cast to float8",
    records=("operands",),
    needs_linears=True,
)
def check_underflow(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Do casts flush to zero, and saturate, the same share of every operand as on one rank?"""
    solo = finished(witnesses.solo)
    if solo is None:
        yield unfinished(NO_REFERENCE, "the single-rank reference (solo witness)", witnesses.solo, run)
        return
    of_solo = {share.operand: share for share in solo.traces[0].cast_shares or ()}
    judged = judged_steps(case, witnesses.expect.numerics)
    mine = (share for share in cast_shares(run.traces) if share.step <= judged)
    both = [(share, of_solo[share.operand]) for share in mine if share.operand in of_solo]
    if not both:
        yield NOTHING_COMPARED.finding(expected="casts of the same operands")
    allowed = allowed_share(case, witnesses.expect.numerics)
    flushed = [Lost(cast, cast.flushed / cast.elements, one.flushed / one.elements) for cast, one in both]
    saturated = [Lost(cast, cast.saturated / cast.elements, one.saturated / one.elements) for cast, one in both]
    yield from _moved(FLUSHED, "become zero", flushed, allowed)
    yield from _moved(SATURATED, "saturate", saturated, allowed)


def allowed_share(case: Case, numerics: Numerics) -> float:
    """How far the share of an operand may be from the single-rank one."""
    if sums_in_order(case, numerics) or case.train.dtype == "float64":
        return EXACT
    moves = (
        activations_differ(case, numerics) or clips_by_a_rounded_norm(case) or case.float8.traits.power_of_two_scales
    )
    rounded = ROUNDED_DOWN if case.float8.traits.rounds_scales_down else ROUNDED
    return rounded if moves else REPLICAS


def judged_steps(case: Case, numerics: Numerics) -> int:
    """How many steps are judged: all, where no rounding accumulates."""
    exact = allowed_share(case, numerics) in (EXACT, REPLICAS)
    return case.train.steps if exact else min(case.train.steps, MEASURED_STEPS)


def _moved(rule: Rule, become: str, lost: list[Lost], allowed: float) -> Iterator[Finding]:
    """The first operand that loses another share."""
    wrong = [share for share in lost if not share.distance <= allowed]
    if wrong:
        first = min(wrong, key=lambda share: share.cast.step)
        yield rule.finding(
            step=first.cast.step,
            module=first.cast.fqn,
            operand=first.cast.role,
            expected=f"{first.expected:.6g} of the values",
            found=f"{first.found:.6g}",
            size=max(share.distance for share in wrong),
            become=become,
            distance=first.distance,
            allowed=allowed,
            count=len(wrong),
            compared=len(lost),
            values={"found": first.found, "expected": first.expected},
        )


def cast_shares(traces: Iterable[RankTrace]) -> tuple[CastShare, ...]:
    """How many values casts lost over all ranks and phases: one record for every form of every operand and step."""
    sums: dict[tuple[object, ...], list[CastRecord]] = {}
    for cast in (cast for trace in traces if trace.operands is not None for cast in trace.operands.casts):
        sums.setdefault((cast.step, cast.fqn, cast.role, cast.axiswise_dim, cast.target_dtype), []).append(cast)
    return tuple(_added(casts) for casts in sums.values() if any(cast.elements for cast in casts))


def _added(casts: list[CastRecord]) -> CastShare:
    return CastShare(
        **{name: getattr(casts[0], name) for name in ("step", "fqn", "role", "axiswise_dim", "target_dtype")},
        **{name: sum(getattr(cast, name) for cast in casts) for name in ("elements", "flushed", "saturated")},
    )


def with_cast_shares(run: Run) -> Run:
    """A solo witness with what its casts lost in place of its operands, which are too many for memory."""
    (trace,) = run.traces
    if trace.operands is None:
        return run
    return replace(run, traces=(replace(trace, operands=None, cast_shares=cast_shares(run.traces)),))
