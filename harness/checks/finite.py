"""Did every rank train all the way, on real numbers? Ranks, step numbers, NaN, infinity, gradients that vanish."""

from __future__ import annotations

import math
from collections import Counter

from harness.checks.ranks import by_value, ordered, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.trace import Run
from harness.verdict import Finding, Verdict

NAME = "finite"


def check_finite(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when a rank or step is missing, or a loss or gradient norm is no positive finite number."""
    del witnesses  # a run must be complete and finite whatever it is compared with
    return [*_attendance(case, run), *_steps(case, run), *_numbers(run)]


def _attendance(case: Case, run: Run) -> list[Finding]:
    """Every rank of the world exactly once."""
    count = Counter(trace.rank for trace in run.traces)
    world = set(range(case.world_size))
    wrong = {
        "left no trace": world - set(count),
        "outside the world of this case left a trace": set(count) - world,
        "left more than one trace": {rank for rank, times in count.items() if times > 1},
    }
    return [
        Finding(
            check=NAME,
            message=f"{rank_names(ranks)} {what}",
            rank=min(ranks),
            expected=f"{case.world_size} ranks",
            found=f"{len(run.traces)} traces",
        )
        for what, ranks in wrong.items()
        if ranks
    ]


def _steps(case: Case, run: Run) -> list[Finding]:
    """Steps 1 to n, each once and in order."""
    expected = tuple(range(1, case.train.steps + 1))
    return [
        Finding(
            check=NAME,
            message=f"{rank_names(ranks)} did not record steps 1 to {case.train.steps}",
            rank=ranks[0],
            expected=f"{len(expected)} steps: {_numbered(expected)}",
            found=f"{len(steps)} steps: {_numbered(steps)}",
        )
        for steps, ranks in by_value(run, lambda trace: tuple(step.step for step in trace.steps)).items()
        if steps != expected
    ]


def _numbered(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:12]))
    return f"{shown}, …" if len(steps) > 12 else shown or "none"


def _numbers(run: Run) -> list[Finding]:
    """The first step and rank of each quantity that went wrong, and how many values did in all."""
    bad: dict[str, list[tuple[int, int, float]]] = {"loss": [], "grad_norm": []}
    for trace in ordered(run):
        for step in trace.steps:
            if not math.isfinite(step.loss):
                bad["loss"].append((step.step, trace.rank, step.loss))
            if not (math.isfinite(step.grad_norm) and step.grad_norm > 0):
                bad["grad_norm"].append((step.step, trace.rank, step.grad_norm))
    return [_first(quantity, values) for quantity, values in bad.items() if values]


def _first(quantity: str, values: list[tuple[int, int, float]]) -> Finding:
    step, rank, value = min(values, key=lambda item: item[:2])
    ranks = rank_names(other for _, other, _ in values)
    return Finding(
        check=NAME,
        message=f"{quantity} is {value} at step {step} on rank {rank}; {len(values)} such value(s) on {ranks}",
        verdict=Verdict.NUMERIC,
        step=step,
        rank=rank,
        expected="a finite number" if quantity == "loss" else "a finite number above 0",
        found=str(value),
    )
