"""Which of several curves of one job is wrong: each is compared with the others, which show what rounding does to it.

How far rounding moves a loss or a norm depends on the model, the learning rate and the step: of two layouts of tiny
Llamas by 1e-4, of a mixture of experts by a quarter. So nothing is allowed that was not measured on the job itself:
`MARGIN` times the widest gap between other layouts of it, up to this step.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from harness.errors import HarnessError
from harness.evidence.curve import Number, TextCurve, job_of
from harness.matrix.case import Case
from harness.registry import is_llama
from harness.text import counted

MIN_OTHERS = 4  # of fewer, the gap between them may be small by chance
MARGIN = 5.0  # in 2,718 judgements, of a curve by 4 to 6 others of one of 18 clean jobs, the furthest was 3.5 gaps off
FIRST_STEPS = 3  # share their gap: before the first update, layouts that split only the batch have the same loss
EXACT = 1e-8  # relative: no fault is smaller, and sums in another order may be
Word = Literal["equal", "rounding", "wrong"]
KINDS = ("loss", "grad_norm")


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """A number of one step, its distance to the nearest of the others, and what is allowed, relative to them."""

    step: int
    kind: str  # loss, grad_norm
    value: float
    nearest: float
    off: float  # less what printing rounded
    allowed: float

    @property
    def word(self) -> Word:
        if self.off == 0:
            return "equal"
        return "rounding" if self.off <= self.allowed else "wrong"  # NaN and infinity are wrong


class CurveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One curve against the others. `first`: what is wrong first; `worst`: what is closest to its limit."""

    name: str
    word: Word
    others: tuple[str, ...]
    steps: tuple[tuple[int, Word], ...]
    first: Distance | None
    worst: Distance


def judge_curve(curve: TextCurve, others: Sequence[TextCurve]) -> CurveRow:
    """HarnessError where it is not equal and the others are too few, or where they have no step in common."""
    sound = [other for other in others if all(number.finite for kind in KINDS for _, number in _numbers(other, kind))]
    distances = [distance for kind in KINDS for distance in _distances(curve, sound, kind)]
    if not distances:
        raise HarnessError("has no step in common with the others.", where=curve.name, fix="give runs of the same job.")
    different = len({other.points for other in sound})
    if different < MIN_OTHERS and any(distance.word != "equal" for distance in distances):
        what = f"{counted(different, 'other run')} of its job cannot show what rounding does to it."
        raise HarnessError(what, where=curve.name, fix=f"give at least {MIN_OTHERS} others, in layouts that differ.")
    distances.sort(key=lambda distance: distance.step)
    steps = tuple(
        (step, _worst_word(group)) for step, group in itertools.groupby(distances, key=lambda distance: distance.step)
    )
    return CurveRow(
        name=curve.name,
        word=_worst_word(distances),
        others=tuple(other.name for other in sound),
        steps=steps,
        first=next((distance for distance in distances if distance.word == "wrong"), None),
        worst=max(distances, key=lambda distance: distance.off / distance.allowed),
    )


def check_job(curve: TextCurve, case: Case) -> None:
    """HarnessError for a curve of another job than this case: no run of it has such numbers."""
    own, asked = curve.job, job_of(case)
    if own in ("", asked) or (curve.case is None and not is_llama(case.target)):
        return  # a log says nothing of its job: whoever gives it does
    if curve.case is None:
        what = f"{own} is a job of torchtitan's own: another model, seed and data than {asked}."
        fix = "judge it by files of the same job in other layouts: give --golden several times, and no case."
    else:
        what, fix = f"it is of {own}, and {asked} runs.", "leave the case and its options out: the file names them."
    raise HarnessError(what, where=curve.name, fix=fix)


def judge_each(curves: Sequence[TextCurve]) -> tuple[CurveRow, ...]:
    """Each against all others. HarnessError for curves of different jobs."""
    for curve in curves[1:]:
        if curve.job != curves[0].job:
            what = f"is of {curve.job or 'a job that it does not name'}, {curves[0].name} of {curves[0].job or 'none'}."
            raise HarnessError(what, where=curve.name, fix="give files of one model, seed and data.")
    return tuple(judge_curve(curve, [*curves[:index], *curves[index + 1 :]]) for index, curve in enumerate(curves))


def _worst_word(distances: Iterable[Distance]) -> Word:
    words = {distance.word for distance in distances}
    return "wrong" if "wrong" in words else "rounding" if "rounding" in words else "equal"


def _numbers(curve: TextCurve, kind: str) -> list[tuple[int, Number]]:
    numbers = [(point.step, point.loss if kind == "loss" else point.grad_norm) for point in curve.points]
    return [(step, number) for step, number in numbers if number is not None]


def _distances(curve: TextCurve, others: Sequence[TextCurve], kind: str) -> list[Distance]:
    known = [dict(_numbers(other, kind)) for other in others]
    own = [(step, number) for step, number in _numbers(curve, kind) if all(step in by_step for by_step in known)]
    seen = [[by_step[step] for by_step in known] for step, _ in own]
    gaps = list(itertools.accumulate(map(_gap, seen), max))
    return [
        _distance(step, kind, number, nearby, gaps[max(index, min(FIRST_STEPS, len(own)) - 1)])
        for index, ((step, number), nearby) in enumerate(zip(own, seen, strict=True))
    ]


def _gap(numbers: Sequence[Number]) -> float:
    """Between the smallest and the largest, relative."""
    values = [number.value for number in numbers]
    return (max(values) - min(values)) / max(abs(min(values)), EXACT)


def _distance(step: int, kind: str, number: Number, others: Sequence[Number], gap: float) -> Distance:
    nearest = min(others, key=lambda other: abs(other.value - number.value))
    off = abs(number.value - nearest.value) - number.half - nearest.half
    return Distance(
        step=step,
        kind=kind,
        value=number.value,
        nearest=nearest.value,
        off=0.0 if off <= 0 else off / max(abs(nearest.value), EXACT),
        allowed=max(MARGIN * gap, EXACT),
    )
