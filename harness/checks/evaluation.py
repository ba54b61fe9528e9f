"""Evaluation: is the loss of a batch the one that training on it then has? Judged from numbers of each rank alone.

Between the two no weight changes, and no module of a Llama does anything else in evaluation mode, so every bit is the
same. The loss of training is compared with the single-rank reference, which evaluates nothing.
"""

from __future__ import annotations

from harness.checks.check import Check
from harness.checks.mismatch import same_number, size_of_error
from harness.checks.ranks import traces_by_rank
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.trace import Run, StepTrace
from harness.verdict import Finding

NAME = "evaluation"

_rule = Rules("evaluation")
OTHER_LOSS = _rule(
    "loss",
    Stage.STEP,
    "the loss of the evaluation is not that of training on the same batch with the same weights",
    numeric=True,
)


def check_evaluation(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """The first step on the first rank whose batch is evaluated with another loss."""
    del case, witnesses  # it needs no other run
    steps = [(step, trace.rank) for trace in traces_by_rank(run) for step in trace.steps]
    wrong = [(step, rank) for step, rank in steps if not _is_equal(step)]
    return [_finding(*min(wrong, key=lambda each: each[0].step))] if wrong else []


def _is_equal(step: StepTrace) -> bool:
    return step.evaluation_loss is not None and same_number(step.evaluation_loss, step.loss)


def _finding(step: StepTrace, rank: int) -> Finding:
    found = step.evaluation_loss
    return OTHER_LOSS.finding(
        step=step.step,
        rank=rank,
        expected=repr(step.loss),
        found=repr(found),
        size=None if found is None else size_of_error("loss", found, step.loss),
    )


CHECK = Check(
    name=NAME,
    question="Is the loss of a batch in evaluation the one that training on it then has?",
    blind="Modules that compute the same wrong loss in both modes; the loss of training is compared by other checks.",
    function=check_evaluation,
    rules=_rule.declared,
    not_judged=lambda expect, device: "" if expect.case.train.evaluate else "nothing is evaluated",
)
