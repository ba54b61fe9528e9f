"""Metamorphic: does a case compute what its partner, which lacks options that must be neutral, computes?

The solo witness cannot answer this sharply where a layout adds up in another order: rounding drowns it. The partner has
the same layout, so its bits are the same. It does not know which options are neutral; that is `spec/relations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.assembly import SketchKey, assemble, relative_distance
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.caseid import case_id
from harness.spec.relations import Relation
from harness.trace import Run
from harness.trace.sketches import TensorSketch
from harness.verdict import Finding, Verdict

NAME = "metamorphic"

# Allowed relative distance of an exact promise. Sums of float64 in another order were at most 9e-16 apart.
EXACT = 1e-11

_NUMBERS = ("loss", "grad_norm")


def check_metamorphic(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings at the first step where the run is not what `witnesses.relation` promises; none without a relation."""
    relation, partner = witnesses.relation, witnesses.partner
    if relation is None:
        return []
    if partner is None:
        words = _told(relation, "could not be run: nothing to compare with")
        return [Finding(check=NAME, message=words, expected="a partner")]
    return [*_numbers(relation, run, partner), *_tensors(relation, run, partner)]


def _numbers(relation: Relation, run: Run, partner: Run) -> Iterator[Finding]:
    """The first step at which a loss or a norm is not the promised one. Steps that are missing are `finite`'s."""
    expected = {step.step: step for step in partner.traces[0].steps}
    for name in _NUMBERS:
        off = [
            (step.step, trace.rank, getattr(step, name), getattr(expected[step.step], name))
            for trace in run.traces
            for step in trace.steps
            if step.step in expected and _is_promised(relation, step.step)
        ]
        first = min((each for each in off if not _is_equal(relation, each[2], each[3])), default=None)
        if first is not None:
            step, rank, found, wanted = first
            yield Finding(
                check=NAME,
                message=_told(relation, f"has another {name.replace('_', ' ')}: {wanted!r}, here {found!r}"),
                verdict=Verdict.NUMERIC,
                step=step,
                rank=rank,
                expected=repr(wanted),
                found=repr(found),
            )


class _Difference(NamedTuple):
    """One tensor that is not as promised. `rank` is None where it was put together from several."""

    key: SketchKey
    rank: int | None
    distance: float
    expected: str
    found: str


def _tensors(relation: Relation, run: Run, partner: Run) -> Iterator[Finding]:
    compare = _unequal_bits if relation.promise == "bitwise" else _unequal_sketches
    found, expected = _keys(relation, run), _keys(relation, partner)
    if not expected:
        words = _told(relation, "recorded no gradient: nothing was compared")
        yield Finding(check=NAME, message=words, expected="sketches")
    for key in sorted(found ^ expected)[:1]:
        side = "here only" if key in found else "there only"
        words = (
            f"sketched other tensors: {len(found ^ expected)} on one side alone, first {key.kind} of {key.fqn} {side}"
        )
        yield Finding(check=NAME, message=_told(relation, words), step=key.step, module=key.fqn)
    differences = [each for each in compare(run, partner) if each.key in found & expected]
    if differences:
        first = min((each.key.step, each.key.kind) for each in differences)
        together = [each for each in differences if each.key[:2] == first]
        compared = len({key for key in found & expected if key[:2] == first})
        yield _first_difference(relation, together, compared)


def _first_difference(relation: Relation, off: list[_Difference], compared: int) -> Finding:
    worst = max(off, key=lambda each: math.inf if math.isnan(each.distance) else each.distance)
    noun = {"grad": "gradients", "param": "final parameters"}[worst.key.kind]
    count = len({each.key for each in off})
    words = f"has other {noun}: {count} of {compared}; worst {worst.key.fqn}, {worst.distance:.2g} of its norm away"
    return Finding(
        check=NAME,
        message=_told(relation, words),
        verdict=Verdict.NUMERIC,
        step=worst.key.step,
        rank=worst.rank,
        module=worst.key.fqn,
        expected=worst.expected,
        found=worst.found,
    )


def _unequal_bits(run: Run, partner: Run) -> list[_Difference]:
    """Pieces of a rank that are not the same bits on the same rank of the partner, or not finite."""
    found, expected = _pieces(run), _pieces(partner)
    off = [place for place in sorted(found) if not _same_bits(found[place], expected.get(place))]
    distances = _distances(run, partner) if off else {}
    return [
        _Difference(
            key, rank, distances.get(key, math.nan), _words(expected.get((key, rank))), _words(found[key, rank])
        )
        for key, rank in off
    ]


def _same_bits(piece: TensorSketch, other: TensorSketch | None) -> bool:
    """True for equal bits of equal places. NaN never equals anything, itself included."""
    if other is None or not math.isfinite(piece.norm_squared):
        return False
    return (piece.digest, piece.offset, piece.local_shape) == (other.digest, other.offset, other.local_shape)


def _words(piece: TensorSketch | None) -> str:
    return "nothing" if piece is None else f"{list(piece.local_shape)} at {list(piece.offset)}: {piece.digest}"


def _unequal_sketches(run: Run, partner: Run) -> list[_Difference]:
    """Logical tensors that are further apart than the rounding of sums; the layouts may differ."""
    return [
        _Difference(key, None, distance, f"distance <= {EXACT:.2g}", f"{distance:.2g}")
        for key, distance in _distances(run, partner).items()
        if not distance <= EXACT  # NaN is off
    ]


def _distances(run: Run, partner: Run) -> dict[SketchKey, float]:
    found, expected = assemble(run.traces), assemble(partner.traces)
    return {key: relative_distance(found[key], expected[key]) for key in found if key in expected}


def _keys(relation: Relation, run: Run) -> set[SketchKey]:
    """What is compared: `_unequal_bits` and `_unequal_sketches` see steps that nothing is promised about, too."""
    return {key for key, _ in _pieces(run) if _is_promised(relation, key.step)}


def _pieces(run: Run) -> dict[tuple[SketchKey, int], TensorSketch]:
    return {
        (SketchKey(sketch.step, sketch.kind, sketch.fqn), trace.rank): sketch
        for trace in run.traces
        for sketch in trace.sketches or ()
    }


def _is_promised(relation: Relation, step: int) -> bool:
    return relation.steps is None or step <= relation.steps


def _is_equal(relation: Relation, found: float, expected: float) -> bool:
    """By the promise; false for NaN and infinities on either side."""
    allowed = 0.0 if relation.promise == "bitwise" else EXACT * abs(expected)
    return math.isfinite(expected) and abs(found - expected) <= allowed


def _told(relation: Relation, what: str) -> str:
    promise = {"bitwise": "the same bits", "exact": "the same numbers"}[relation.promise]
    return f"the partner {case_id(relation.partner)} ({relation.name}) must give {promise}, but it {what}"
