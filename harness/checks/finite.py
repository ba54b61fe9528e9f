"""Did every rank train to the last step with finite numbers? Ranks, steps, NaN, infinity, gradient norms of zero."""

from __future__ import annotations

import math
from collections import Counter

from harness.checks.check import Check
from harness.checks.ranks import group_ranks, traces_by_rank
from harness.checks.rule import Rule, Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.plural import counted
from harness.trace import Run
from harness.verdict import Finding

NAME = "finite"


_rule = Rules("finite")
NO_TRACE = _rule("no-trace", Stage.RUN, "{ranks} left no trace")
OTHER_WORLD = _rule("other-world", Stage.RUN, "{ranks} outside the world of this case left a trace")
SEVERAL_TRACES = _rule("several-traces", Stage.RUN, "{ranks} left more than one trace")
STEPS = _rule("steps", Stage.RUN, "{ranks} did not record steps 1 to {steps}")
_BAD = "{quantity} is {value} at step {step} on rank {rank}; bad values: {count}, on {ranks}"
LOSS = _rule("loss", Stage.NO_NUMBER, _BAD, numeric=True)
GRAD_NORM = _rule("grad-norm", Stage.BF16, _BAD, numeric=True)


def check_finite(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings for a missing rank or step, a loss that is not finite, a gradient norm that is not a positive number."""
    del witnesses  # a run must be complete and finite whatever it is compared with
    return [*_ranks(case, run), *_steps(case, run), *_numbers(run)]


def _ranks(case: Case, run: Run) -> list[Finding]:
    """One trace of every rank of the world, and no other."""
    count = Counter(trace.rank for trace in run.traces)
    world = set(range(case.world_size))
    wrong = (
        (NO_TRACE, world - set(count)),
        (OTHER_WORLD, set(count) - world),
        (SEVERAL_TRACES, {rank for rank, times in count.items() if times > 1}),
    )
    expected, found = counted(case.world_size, "rank"), counted(len(run.traces), "trace")
    return [rule.finding(ranks=ranks, expected=expected, found=found) for rule, ranks in wrong if ranks]


def _steps(case: Case, run: Run) -> list[Finding]:
    """Steps 1 to n, each once and in order."""
    expected = tuple(range(1, case.train.steps + 1))
    return [
        STEPS.finding(
            ranks=ranks,
            steps=case.train.steps,
            expected=f"{counted(len(expected), 'step')}: {_text(expected)}",
            found=f"{counted(len(steps), 'step')}: {_text(steps)}",
        )
        for steps, ranks in group_ranks(run, lambda trace: tuple(step.step for step in trace.steps)).items()
        if steps != expected
    ]


def _text(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:12]))
    return f"{shown}, …" if len(steps) > 12 else shown or "none"


def _numbers(run: Run) -> list[Finding]:
    """For loss and gradient norm the first bad value, with the number of bad values."""
    losses: list[tuple[int, int, float]] = []
    norms: list[tuple[int, int, float]] = []
    for trace in traces_by_rank(run):
        for step in trace.steps:
            if not math.isfinite(step.loss):
                losses.append((step.step, trace.rank, step.loss))
            if not (math.isfinite(step.grad_norm) and step.grad_norm > 0):
                norms.append((step.step, trace.rank, step.grad_norm))
    return [
        *_first(LOSS, losses, "loss", "a finite number"),
        *_first(GRAD_NORM, norms, "grad_norm", "a finite number above 0"),
    ]


def _first(rule: Rule, values: list[tuple[int, int, float]], quantity: str, expected: str) -> list[Finding]:
    if not values:
        return []
    step, rank, value = min(values, key=lambda item: item[:2])
    return [
        rule.finding(
            step=step,
            rank=rank,
            ranks=[other for _, other, _ in values],
            expected=expected,
            found=str(value),
            quantity=quantity,
            value=str(value),
            count=len(values),
        )
    ]


CHECK = Check(
    name=NAME,
    question="Did every rank train to the last step with finite numbers?",
    blind="Numbers that are finite and wrong.",
    function=check_finite,
    rules=_rule.declared,
)
