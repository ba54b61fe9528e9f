"""The parity of layouts: one case trained in many layouts, each compared with one rank, and one word about each.

The words are those of `studies/layouts.py`; nothing is judged here.

Of several curves of one job, each is compared with the others, which show what rounding does to it. How far rounding
moves a loss or a norm depends on the model, the learning rate and the step: of two layouts of tiny Llamas by 1e-4, of a
mixture of experts by a quarter. So nothing is allowed that was not measured on the job itself: `MARGIN` times the
widest gap between other layouts of it, up to this step.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from harness.engine.hardware import usable_cpus
from harness.errors import HarnessError
from harness.evidence.costs import estimate, read_costs
from harness.matrix.axes import case_from_axes, changed
from harness.matrix.case import Case, Dtype, Layout
from harness.matrix.caseid import case_id, layout_id, parse_case_id
from harness.matrix.layout import REST
from harness.matrix.models import layouts
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.parity.against import Against, Base, Change, change
from harness.plugins.parity.curves import Number, TextCurve, curve_of_case, job_of
from harness.project import Project
from harness.registry import is_llama
from harness.result import CaseResult, RunResult, WorstGradient
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.selection import START_S, NothingSelected, Query, relative_speed
from harness.studies.layouts import Word, nearest, word_of
from harness.studies.one_step import OneStep, judged_one_step, one_step_cases
from harness.text import counted
from harness.verdict import ExitCode, Finding, Verdict, exit_code
from harness.workflow import run

MIN_OTHERS = 4  # of fewer, the gap between them may be small by chance
MARGIN = 5.0  # in 2,718 judgements, of a curve by 4 to 6 others of one of 18 clean jobs, the furthest was 3.5 gaps off
FIRST_STEPS = 3  # share their gap: before the first update, layouts that split only the batch have the same loss
EXACT = 1e-8  # relative: no fault is smaller, and sums in another order may be
CurveWord = Literal["equal", "rounding", "wrong"]
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
    def word(self) -> CurveWord:
        if self.off == 0:
            return "equal"
        return "rounding" if self.off <= self.allowed else "wrong"  # NaN and infinity are wrong


class CurveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One curve against the others. `first`: what is wrong first; `worst`: what is closest to its limit."""

    name: str
    word: CurveWord
    others: tuple[str, ...]
    steps: tuple[tuple[int, CurveWord], ...]
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
    by_step = itertools.groupby(distances, key=lambda distance: distance.step)
    return CurveRow(
        name=curve.name,
        word=_worst_word(distances),
        others=tuple(other.name for other in sound),
        steps=tuple((step, _worst_word(group)) for step, group in by_step),
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
        fix = "compare it with files of the same job in other layouts: give --golden several times, and no case."
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


def _worst_word(distances: Iterable[Distance]) -> CurveWord:
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


BUDGET_S = 120.0  # of the layouts that are chosen here
_USUAL_OF_TP = ("sequence_parallel", "loss_parallel")  # on unless a case says otherwise


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `why`: the rule that excludes or refuses it, or what is wrong."""

    layout: str
    case_id: str
    word: Word
    why: str = ""
    decided_by: str = ""  # what the word follows from: a gradient, or the rule of what is wrong first
    error: float | None = None  # relative, of what decides
    tolerance: float | None = None  # of the same
    losses: tuple[float, ...] = ()  # nats, of every step
    grad_norms: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()  # losses of the single-rank reference, which divides the batch as this layout
    worst_gradient: WorstGradient | None = None
    logprobs: tuple[float, float] | None = None  # of labels: largest and mean distance, in nats
    replay: float | None = None  # the largest distance of a tensor of a module from its replay on one rank
    first: Finding | None = None  # what is wrong first: module, operand, step and rank
    command: str = ""  # runs this layout alone
    change: Change = ""  # what became of it since the base; empty without one
    moved: str = ""  # by how much its numbers differ from those of the base, where no rounding explains it
    base: "Row | None" = None  # the same layout there; None where the base has no such target


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """All layouts in the order of the question. `left_out`: those that did not fit into the budget."""

    schema: int = 1
    case_id: str  # on one rank
    rows: tuple[Row, ...]
    one_step: tuple[Row, ...] = ()  # what training loops get wrong, of a target of one's own
    left_out: tuple[str, ...]
    exit_code: ExitCode
    seconds: float
    against: str = ""  # what the base is: a revision, a version, an environment
    software: Mapping[str, str]
    golden: CurveRow | None = None  # the file that was judged by the layouts

    @property
    def every(self) -> tuple[Row, ...]:
        return (*self.rows, *self.one_step)


def usual_layouts(most: int) -> Iterator[Layout]:
    """Yield every mesh of a power of two of ranks, up to `most`."""
    for power in range(most.bit_length()):
        yield from (case.layout for case in layouts(case_from_axes({REST: 1 << power})))


def within(project: Project, cases: Sequence[Case], budget_s: float) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the cheapest cases that fit into so many seconds of wall clock here, cheapest first, and the others."""
    costs = read_costs(project.root)
    speed = relative_speed(project, costs)
    estimates = {case: estimate(case, costs) for case in cases}
    seconds = {case: speed * (estimated.case_cpu_s + estimated.witness_cpu_s) for case, estimated in estimates.items()}
    ordered = sorted(cases, key=lambda case: (seconds[case], case.world_size))
    left_s, count = (budget_s - START_S) * usable_cpus(), 0
    for case in ordered:
        left_s -= seconds[case]
        count += left_s >= 0
    if not count:
        raise NothingSelected(f"no layout fits into {budget_s:g} s.", where="--budget-s", fix="give more seconds.")
    return tuple(ordered[:count]), tuple(ordered[count:])


def compare_layouts(
    project: Project,
    cases: Sequence[Case],
    plan: Plan,
    progress: Progress,
    *,
    budget_s: float | None,
    against: Against | None = None,
) -> tuple[Parity, RunResult]:
    """Run the cases that no rule excludes, and store the run. The base runs first."""
    of_one = len({_on_one_rank(case) for case in cases}) == 1
    labels = {case_id(case): layout_id(case.layout) for case in cases} if of_one else _labels(map(case_id, cases))
    excluded = [
        Row(layout=labels[case_id(case)], case_id=case_id(case), word="excluded", why=rules[0].name)
        for case in cases
        if (rules := exclusions(case))
    ]
    allowed = tuple(case for case in cases if not exclusions(case))
    sharp: Dtype = "float32" if plan.device == "cuda" else "float64"
    if not allowed:
        why = ", ".join(f"{row.layout}: {row.why}" for row in excluded)
        raise NothingSelected(f"every layout is excluded: {why}.", where="--layouts", fix="give others.")
    chosen, others = (allowed, ()) if budget_s is None else within(project, allowed, budget_s)
    ids = tuple(map(case_id, chosen))
    base = None if against is None else against.run(chosen[0].target, ids)
    more = one_step_cases(chosen[0], [case.layout for case in chosen] if of_one else (), sharp)
    result, _ = run(project, Query(sources=(*ids, *more)), plan, progress, hints=False)
    one_step = judged_one_step(more, result.results)
    judged = (one_step[of.case_id].result if of.case_id in one_step else of for of in result.results)
    result = msgspec.structs.replace(result, results=tuple(judged))
    every = [_beside(base, of) if of.case_id in ids else _of_one_step(one_step[of.case_id]) for of in result.results]
    named = (msgspec.structs.replace(of, layout=labels[of.case_id]) for of in every if of.case_id in ids)
    parity = Parity(
        case_id=case_id(_on_one_rank(chosen[0])) if of_one else counted(len(cases), "case"),
        against="" if base is None else base.name,
        rows=(*named, *excluded),
        one_step=tuple(of for of in every if of.case_id not in ids),
        left_out=tuple(labels[case_id(case)] for case in others),
        exit_code=exit_code_of(every, result),
        seconds=result.end.wall_s,
        software=result.end.provenance,
    )
    return parity, result


def _on_one_rank(case: Case) -> Case:
    return msgspec.structs.replace(case, layout=Layout())


def _labels(ids: Iterable[str]) -> Mapping[str, str]:
    """Return what the rows of several cases are called: the words of an id that not all ids have."""
    words = {name: name.split("-") for name in ids}
    shared = set.intersection(*map(set, words.values()))
    return {name: "-".join(word for word in words[name] if word not in shared) or name for name in words}


def with_golden(parity: Parity, golden: TextCurve) -> Parity:
    """Return the parity with this file judged by its sound layouts. HarnessError where they are too few."""
    sound = [row for row in parity.rows if row.word in ("equal", "rounding", "drift")]
    judged = judge_curve(golden, [curve_of_case(row.case_id, row.losses, row.grad_norms) for row in sound])
    code = ExitCode.FAILED if judged.word == "wrong" and parity.exit_code is ExitCode.GOOD else parity.exit_code
    return msgspec.structs.replace(parity, golden=judged, exit_code=code)


def without_refused(rows: Iterable[Row]) -> tuple[str, ...]:
    """What is usual of TP, on in every layout that the target itself refuses, and off in those under TP that ran.

    Nothing where no rule allows these layouts without it.
    """
    cases = [(row.word == "refused", parse_case_id(row.case_id)) for row in rows if row.word != "excluded"]
    under_tp = [(refused, case) for refused, case in cases if case.layout.tp > 1 and expected_refusal(case) is None]
    refusals = [case for refused, case in under_tp if refused]
    axes = [
        name
        for name in _USUAL_OF_TP
        if refusals and all(getattr(case.layout, name) is refused for refused, case in under_tp)
    ]
    allowed = any(not exclusions(changed(case, dict.fromkeys(axes, False))) for case in refusals)
    return tuple(axes) if allowed else ()


def _beside(base: Base | None, result: CaseResult) -> Row:
    """Return the row of a case, with the row of the base."""
    current = row(result)
    if base is None:
        return current
    then = base.results.get(result.case_id)
    if then is None:
        return msgspec.structs.replace(current, change="new")
    before = row(then)
    became, by = change(current.word, before.word, result, then)
    return msgspec.structs.replace(current, change=became, moved=by, base=before)


def _of_one_step(shown: OneStep) -> Row:
    shown_row = msgspec.structs.replace(row(shown.result), layout=shown.label)
    return shown_row if shown.refused is None else msgspec.structs.replace(shown_row, word="refused", why=shown.refused)


def row(result: CaseResult) -> Row:
    """Return what the table says of a case that was to run."""
    case, measured = parse_case_id(result.case_id), result.measured
    word, why = word_of(result)
    solo = None if measured is None else measured.curves.get("solo")
    decided_by, error, tolerance = _decision(result, word)
    return Row(
        layout=layout_id(case.layout),
        case_id=result.case_id,
        word=word,
        why=why,
        decided_by=decided_by,
        error=error,
        tolerance=tolerance,
        losses=result.losses,
        grad_norms=result.grad_norms,
        reference=() if solo is None else solo.losses,
        worst_gradient=None if measured is None else measured.worst_gradient,
        logprobs=None if measured is None else measured.logprobs,
        replay=None if measured is None else measured.module_replay,
        first=nearest(result),
        command=result.command,
    )


def _decision(result: CaseResult, word: Word) -> tuple[str, float | None, float | None]:
    """Return what a word follows from, with its relative error and tolerance where it has these."""
    worst, first = None if result.measured is None else result.measured.worst_gradient, nearest(result)
    distances = (None, None) if worst is None else (worst.distance, worst.allowed)
    if worst is not None and (word in ("equal", "rounding", "drift") or (word == "wrong" and first is None)):
        return "bitwise equal" if word == "equal" else f"gradient of {worst.fqn}, step {worst.step}", *distances
    if first is None:
        return "", None, None
    own = first.values.get("distance"), first.values.get("allowed")
    if isinstance(own[0], float) and isinstance(own[1], float):
        distances = own[0], own[1]
    elif worst is None or worst.distance <= (worst.allowed or math.inf):
        distances = None, None
    place = f" in {first.module}" if first.module else ""
    return f"{first.rule}{place}{f', step {first.step}' if first.step else ''}", *distances


def exit_code_of(rows: Sequence[Row], result: RunResult) -> ExitCode:
    """As of `run`, but for what a target refuses by itself, and for what a passed case did not compare.

    With an unreleased build a difference from a formula counts where the base does not have it.
    """
    if result.end.interrupted:
        return ExitCode.INTERRUPTED
    instead = {"refused": Verdict.PASSED, "not checked": Verdict.NOT_RUN, "wrong": Verdict.NUMERIC}
    verdicts = [
        Verdict.PASSED if case.excused and of.change != "now differs" else instead.get(of.word, case.verdict)
        for of, case in zip(rows, result.results, strict=True)
    ]
    return exit_code(verdicts)
