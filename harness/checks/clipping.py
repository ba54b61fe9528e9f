"""Does the optimizer get gradients of the norm that the case clips to? Judged from numbers of each rank alone.

The norm that the target reports is taken before clipping, the harness sums that of what the optimizer gets. So a fault
that the single-rank reference shares is seen too.
"""

from __future__ import annotations

from harness.checks.check import Check
from harness.checks.ranks import traces_by_rank
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.trace import Run, StepTrace
from harness.verdict import Finding

NAME = "clipping"

ROUNDING = (
    1e-5  # of the factor, which torch computes in the dtype of the norm; of a step that is clipped, measured: 2e-6
)
_EPS = 1e-6  # torch adds it to the norm that it divides by

_rule = Rules("clipping")
NOT_CLIPPED = _rule(
    "norm",
    Stage.STEP,
    "gradients are not clipped to a norm of {max_norm:g}: {reported}, the optimizer gets {norm:.6g}",
    numeric=True,
    fix="call torch.nn.utils.clip_grad_norm_(parameters, case.train.max_norm) before optimizer.step(), and return "
    "the norm that it returns; over several meshes, of all of them.",
)


def check_clipping(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """The first step on the first rank whose gradients have another norm than the clipped one."""
    del witnesses  # it needs no other run
    max_norm = case.train.max_norm
    assert max_norm is not None, "only of cases that clip gradients"
    steps = [(step, trace.rank) for trace in traces_by_rank(run) for step in trace.steps]
    wrong = [(step, rank) for step, rank in steps if not _is_clipped(step, max_norm)]
    return [_finding(*min(wrong, key=lambda each: each[0].step), max_norm)] if wrong else []


def _expected(step: StepTrace, max_norm: float) -> float | None:
    """The norm after clipping; None where the target reports none."""
    norm = step.reported_grad_norm
    return None if norm is None else norm * min(1.0, max_norm / (norm + _EPS))


def _is_clipped(step: StepTrace, max_norm: float) -> bool:
    expected = _expected(step, max_norm)
    if expected is None:
        return step.grad_norm <= max_norm * (1 + ROUNDING)
    return abs(step.grad_norm - expected) <= ROUNDING * expected  # NaN is wrong


def _finding(step: StepTrace, rank: int, max_norm: float) -> Finding:
    expected, reported = _expected(step, max_norm), step.reported_grad_norm
    told = "no norm is reported" if reported is None else f"the reported norm is {reported:.6g}"
    return NOT_CLIPPED.finding(
        step=step.step,
        rank=rank,
        expected=f"a norm of at most {max_norm:g}" if expected is None else f"a norm of {expected:.9g}",
        found=f"{step.grad_norm:.9g}",
        max_norm=max_norm,
        reported=told,
        norm=step.grad_norm,
    )


CHECK = Check(
    name=NAME,
    question="Does the optimizer get gradients of the norm that the case clips to?",
    blind="Gradients of the right norm and a wrong direction; other checks compare them.",
    function=check_clipping,
    rules=_rule.declared,
    not_judged=lambda expect, device: "gradients are not clipped" if expect.case.train.max_norm is None else "",
)
