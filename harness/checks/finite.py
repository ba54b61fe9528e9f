"""Did every rank train to the last step with finite numbers? Ranks, steps, NaN, infinity, gradient norms of zero."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

from harness.checks.ranks import format_ranks, group_ranks, traces_by_rank
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.plural import counted
from harness.trace import Run
from harness.verdict import Finding, Verdict

NAME = "finite"

_finding = partial(Finding, check=NAME)


def check_finite(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings for a missing rank or step, a loss that is not finite, a gradient norm that is not a positive number."""
    del witnesses  # a run must be complete and finite whatever it is compared with
    return [*_ranks(case, run), *_steps(case, run), *_numbers(run)]


def _ranks(case: Case, run: Run) -> list[Finding]:
    """One trace of every rank of the world, and no other."""
    count = Counter(trace.rank for trace in run.traces)
    world = set(range(case.world_size))
    wrong = {
        "left no trace": world - set(count),
        "outside the world of this case left a trace": set(count) - world,
        "left more than one trace": {rank for rank, times in count.items() if times > 1},
    }
    return [
        _finding(
            message=f"{format_ranks(ranks)} {what}",
            rank=min(ranks),
            expected=counted(case.world_size, "rank"),
            found=counted(len(run.traces), "trace"),
        )
        for what, ranks in wrong.items()
        if ranks
    ]


def _steps(case: Case, run: Run) -> list[Finding]:
    """Steps 1 to n, each once and in order."""
    expected = tuple(range(1, case.train.steps + 1))
    return [
        _finding(
            message=f"{format_ranks(ranks)} did not record steps 1 to {case.train.steps}",
            rank=ranks[0],
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
    bad: dict[str, list[tuple[int, int, float]]] = {"loss": [], "grad_norm": []}
    for trace in traces_by_rank(run):
        for step in trace.steps:
            if not math.isfinite(step.loss):
                bad["loss"].append((step.step, trace.rank, step.loss))
            if not (math.isfinite(step.grad_norm) and step.grad_norm > 0):
                bad["grad_norm"].append((step.step, trace.rank, step.grad_norm))
    return [_first(quantity, values) for quantity, values in bad.items() if values]


def _first(quantity: str, values: list[tuple[int, int, float]]) -> Finding:
    step, rank, value = min(values, key=lambda item: item[:2])
    ranks = format_ranks(other for _, other, _ in values)
    return _finding(
        message=f"{quantity} is {value} at step {step} on rank {rank}; bad values: {len(values)}, on {ranks}",
        verdict=Verdict.NUMERIC,
        step=step,
        rank=rank,
        expected="a finite number" if quantity == "loss" else "a finite number above 0",
        found=str(value),
    )
