"""Is the model called with the tokens that `step` was given, and every rank with its own part of them?

Looks at the integer tensors of every forward of the whole model. A target that trains its single-rank reference on
wrong tokens too would show in no number.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from harness.checks.check import Check, Witnesses, finished
from harness.checks.findings import traces_by_rank
from harness.checks.rule import Rule, Rules, Stage
from harness.matrix.case import Case
from harness.matrix.layout import batch_of, peers
from harness.text import format_ranks
from harness.trace import RankTrace, Run
from harness.trace.model import StepInputs
from harness.verdict import Finding

# A model may get its tokens in a form that is not recognised: packed, with special tokens, every tensor-parallel rank a
# piece. Their neighbours are still neighbours. Of 31 pairs, 8 pieces of a sequence keep 24.
_COVERED = 0.75


_OWN = (
    "train on the microbatches that step() is given, all of them: they are the part of this rank already, so use no "
    "data loader, sampler or slice of your own."
)

_rule = Rules("tokens", Stage.DATA)
LABELS = _rule(
    "labels",
    "{who}: the model is called with the labels (tokens shifted by one)",
    fix="call the model with `batch[:, :-1]`, and compare its logits with `batch[:, 1:]`.",
)
OTHER_RANK = _rule("other-rank", "{who}: the model is called with tokens of another data-parallel rank", fix=_OWN)
SOME = _rule("some", "{who}: the model is called with {got} of {wanted} sequences only", fix=_OWN)
FOREIGN = _rule("foreign", "{who}: the model is called with tokens that are not those of this step", fix=_OWN)


class _Wrong(NamedTuple):
    rule: Rule
    expected: str
    found: str
    got: int  # sequences
    wanted: int


@partial(
    Check,
    declares=_rule,
    blind="A model that is called in parts, or compiled whole; tokens in a form that is not recognised.",
    unasked="inputs",
    absent="the model is not called as a whole",
)
def check_tokens(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is the model called with the tokens that `step` was given, and every rank with its own part of them?"""
    solo = finished(witnesses.solo)
    whole = range(case.train.global_batch)
    of_reference = [] if solo is None else _of_ranks([(solo.traces[0], whole)], {}, "the single-rank reference")
    parts = [(trace, _part(case, trace.rank)) for trace in traces_by_rank(run)]
    return [*_of_ranks(parts, _covered(case, run)), *of_reference]


def _part(case: Case, rank: int) -> range:
    first = batch_of(case.layout, rank) * case.local_batch
    return range(first, first + case.local_batch)


def _covered(case: Case, run: Run) -> dict[tuple[int, int], float]:
    """By rank and step: how much of its tokens a rank gets together with its tensor-parallel peers."""
    own = {
        (trace.rank, step_inputs.step): step_inputs.covered
        for trace in run.traces
        for step_inputs in trace.inputs or ()
    }
    return {
        (rank, step): sum(own.get((peer, step), 0.0) for peer in peers(case.layout, rank, ("tp",)))
        for rank, step in own
    }


def _of_ranks(
    parts: Iterable[tuple[RankTrace, range]], covered: dict[tuple[int, int], float], who: str = ""
) -> list[Finding]:
    wrong: dict[tuple[int, _Wrong], list[int]] = {}
    for trace, part in parts:
        for step_inputs in trace.inputs or ():
            problem = _wrong(step_inputs, part, covered.get((trace.rank, step_inputs.step), step_inputs.covered))
            if problem is not None:
                wrong.setdefault((step_inputs.step, problem), []).append(trace.rank)
    if not wrong:
        return []
    first = min(step for step, _ in wrong)
    return [
        wrong_one.rule.finding(
            who=who or format_ranks(ranks),
            got=wrong_one.got,
            wanted=wrong_one.wanted,
            step=step,
            ranks=() if who else ranks,
            expected=wrong_one.expected,
            found=wrong_one.found,
        )
        for (step, wrong_one), ranks in wrong.items()
        if step == first
    ]


def _wrong(step_inputs: StepInputs, part: range, covered: float) -> _Wrong | None:
    """What is wrong with the inputs of one rank in one step; None for a form that is not recognised, too."""
    missing, foreign = set(part) - set(step_inputs.inputs), sorted(set(step_inputs.inputs) - set(part))
    expected = f"sequences {_spelled(part)} of the global batch"
    counts = len(part) - len(missing), len(part)
    if missing and missing <= set(step_inputs.labels):
        return _Wrong(LABELS, expected, "labels", *counts)
    if foreign:
        return _Wrong(OTHER_RANK, expected, f"sequences {_spelled(step_inputs.inputs)}", *counts)
    if missing and len(missing) < len(part):
        return _Wrong(SOME, expected, f"sequences {_spelled(step_inputs.inputs)}", *counts)
    if missing and covered < _COVERED:
        shapes = ", ".join(f"{list(shape)}" for shape in dict.fromkeys(step_inputs.shapes))
        return _Wrong(FOREIGN, expected, f"tokens of none of them, in tensors {shapes}", *counts)
    return None


def _spelled(sequences: Iterable[int]) -> str:
    return format_ranks(sequences).removeprefix("ranks ").removeprefix("rank ")
