"""Does a cast lose as many values as on one rank? The share that is flushed to zero, and the share that saturates.

A cast to float8 loses small values. How many follows from the values and their scale alone, whatever the layout: every
shard of a tensor is cast with the scale of the tensor. So the shares over all ranks are those of the solo witness,
which replays the data-parallel ranks one after another. Results keep them for every operand, linear and step.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.checks.cast_shares import cast_shares
from harness.checks.check import Check
from harness.checks.ranks import missing_records
from harness.checks.rule import Rule, Rules, Stage
from harness.checks.witnesses import Witnesses, finished, unfinished
from harness.matrix.case import Case
from harness.matrix.numerics import Numerics, sums_in_order
from harness.trace import Run
from harness.trace.operands import CastShare
from harness.verdict import Finding

NAME = "underflow"
# How far a share may be from that of one rank. Exact: the same values are cast with the same scales. Replicas: sums of
# gradients have another order, so single weights of later steps are rounded otherwise; measured over HSDP: 0. Rounded:
# under TP all values differ by the rounding of earlier sums, and where the scale of a row moves by a power of two, so
# does what the row loses; measured over 12 such cases of 5 steps: 3e-4, and 2e-3 where scales moved.
EXACT, REPLICAS, ROUNDED = 1e-12, 1e-4, 0.006

_rule = Rules(NAME)
NO_RECORD = _rule.no_record()
NO_REFERENCE = _rule.no_witness()
NOTHING_COMPARED = _rule(
    "nothing-compared", Stage.RUN, "no cast is one that the single-rank reference has too", judged=False
)
_MOVED = (
    "of {operand} of {module}, {found:.3g} of all values {become} instead of {expected:.3g} on one rank: "
    "{distance:.2g} apart, {allowed:.2g} allowed ({count} of {compared} operands)"
)
FLUSHED = _rule("flushed", Stage.OPERAND, _MOVED, numeric=True, located=True)
SATURATED = _rule("saturated", Stage.OPERAND, _MOVED, numeric=True, located=True)


class Lost(NamedTuple):
    """The share of values that casts of one operand lost, here and on one rank."""

    cast: CastShare
    found: float
    expected: float

    @property
    def distance(self) -> float:
        """How far apart they are."""
        return abs(self.found - self.expected)


def _in_both(run: Run, solo: Run) -> list[tuple[CastShare, CastShare]]:
    """Every operand that the solo witness casts too, here and on one rank, in the order of the run."""
    expected = {each.operand: each for each in solo.traces[0].cast_shares or ()}
    shares = cast_shares(run.traces)
    return [(each, expected[each.operand]) for each in shares if each.operand in expected]


def check_underflow(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For flushed and for saturated values the first operand that loses another share of them than on one rank."""
    missing, solo = missing_records(run, NO_RECORD, "operands"), finished(witnesses.solo)
    if missing:
        return missing
    if solo is None:
        return [unfinished(NO_REFERENCE, "the single-rank reference (solo witness)", witnesses.solo, run)]
    allowed = allowed_share(case, witnesses.expect.numerics)
    both = _in_both(run, solo)
    if not both:
        return [NOTHING_COMPARED.finding(expected="casts of the same operands")]
    flushed = [Lost(cast, cast.flushed / cast.elements, one.flushed / one.elements) for cast, one in both]
    saturated = [Lost(cast, cast.saturated / cast.elements, one.saturated / one.elements) for cast, one in both]
    return [*_moved(FLUSHED, "become zero", flushed, allowed), *_moved(SATURATED, "saturate", saturated, allowed)]


def allowed_share(case: Case, numerics: Numerics) -> float:
    """How far the share of an operand may be from that of one rank."""
    if case.train.dtype == "float64" or sums_in_order(case, numerics):
        return EXACT
    return ROUNDED if case.layout.tp > 1 else REPLICAS


def _moved(rule: Rule, become: str, lost: list[Lost], allowed: float) -> list[Finding]:
    wrong = [each for each in lost if not each.distance <= allowed]
    if not wrong:
        return []
    first = min(wrong, key=lambda each: each.cast.step)
    return [
        rule.finding(
            step=first.cast.step,
            module=first.cast.fqn,
            operand=first.cast.role,
            expected=f"{first.expected:.6g} of the values",
            found=f"{first.found:.6g}",
            size=max(each.distance for each in wrong),
            become=become,
            distance=first.distance,
            allowed=allowed,
            count=len(wrong),
            compared=len(lost),
            values={"found": first.found, "expected": first.expected},
        )
    ]


CHECK = Check(
    name=NAME,
    question="Do casts flush to zero, and saturate, the same share of every operand as on one rank?",
    blind="A recipe that loses as much on one rank; casts in compiled blocks, of which nobody records what they lose.",
    function=check_underflow,
    rules=_rule.declared,
    not_judged=lambda expect, device: "" if expect.case.float8.enabled else "nothing is cast to float8",
    record="operands",
    needs_linears=True,
)
