"""The numbers that every rank reports: finite, and of a step that clips or evaluates, consistent with each other.

No check here needs another run, so a fault that the single-rank reference shares is seen too.
"""

import math
from collections import Counter
from collections.abc import Iterator

from harness.checks.assembly import same_number, size_of_error
from harness.checks.check import Rule, Rules, Stage, Witnesses, about_ranks, group_ranks
from harness.matrix.case import Case
from harness.matrix.numerics import rounding_of_norm
from harness.promises import Limit, keeps
from harness.registry import REFERENCE
from harness.text import counted
from harness.trace import Run, StepTrace
from harness.verdict import Finding, Value

# Finite

_finite = Rules("finite", Stage.RUN, only={"a damaged trace": "no-trace other-world several-traces steps"})
NO_TRACE = _finite("no-trace", "{ranks} left no trace")
OTHER_WORLD = _finite("other-world", "{ranks} outside the world of this case left a trace")
SEVERAL_TRACES = _finite("several-traces", "{ranks} left more than one trace")
STEPS = _finite("steps", "{ranks} did not record steps 1 to {steps}")
_BAD = "{quantity} is {value} at step {step} on rank {rank}; bad values: {count}, on {ranks}"
LOSS = _finite("loss", _BAD, stage=Stage.NONFINITE, numeric=True)
GRAD_NORM = _finite("grad-norm", _BAD, stage=Stage.NONFINITE, numeric=True)


@_finite.judged_by(blind="Numbers that are finite and wrong.")
def check_finite(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Did every rank train to the last step with finite numbers?"""
    yield from _ranks(case, run)
    yield from _steps(case, run)
    steps = [(step, trace.rank) for trace in run.by_rank for step in trace.steps]
    losses = [(step.step, rank, step.loss) for step, rank in steps if not math.isfinite(step.loss)]
    norms = [(step.step, rank, step.grad_norm) for step, rank in steps if not 0 < step.grad_norm < math.inf]
    yield from _first(LOSS, losses, "loss", "a finite number")
    yield from _first(GRAD_NORM, norms, "grad_norm", "a finite number above 0")


def _ranks(case: Case, run: Run) -> Iterator[Finding]:
    count = Counter(trace.rank for trace in run.traces)
    world = set(range(case.world_size))
    wrong = {
        NO_TRACE: world - set(count),
        OTHER_WORLD: set(count) - world,
        SEVERAL_TRACES: {rank for rank, times in count.items() if times > 1},
    }
    expected, found = counted(case.world_size, "rank"), counted(len(run.traces), "trace")
    return (rule.finding(ranks=ranks, expected=expected, found=found) for rule, ranks in wrong.items() if ranks)


def _steps(case: Case, run: Run) -> Iterator[Finding]:
    """Yield steps 1 to n, each once and in order."""
    expected = tuple(range(1, case.train.steps + 1))
    for steps, ranks in group_ranks(run, lambda trace: tuple(step.step for step in trace.steps)).items():
        if steps != expected:
            yield STEPS.finding(ranks=ranks, steps=case.train.steps, expected=_text(expected), found=_text(steps))


def _text(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:12]))
    return f"{counted(len(steps), 'step')}: {f'{shown}, …' if len(steps) > 12 else shown or 'none'}"


def _first(rule: Rule, wrong: list[tuple[int, int, float]], quantity: str, expected: str) -> Iterator[Finding]:
    """Yield the first bad value, with the number of bad values: each with its step and rank."""
    if wrong:
        step, rank, value = min(wrong, key=lambda item: item[:2])
        ranks = [other for _, other, _ in wrong]
        values: dict[str, Value] = {"quantity": quantity, "value": str(value), "count": len(wrong)}
        yield rule.finding(step=step, rank=rank, ranks=ranks, expected=expected, found=str(value), values=values)


# Clipping

_EPS = 1e-6  # torch adds it to the norm that it divides by

_clipping = Rules("clipping", Stage.STEP)
NOT_CLIPPED = _clipping(
    "norm",
    "gradients are not clipped to a norm of {max_norm:g}: {reported}, the optimizer gets {norm:.6g}",
    numeric=True,
    fix="call torch.nn.utils.clip_grad_norm_(parameters, case.train.max_norm) before optimizer.step(), and return "
    "the norm that it returns; over several meshes, of all of them.",
)


@_clipping.judged_by(
    blind="Gradients of the right norm and a wrong direction; other checks compare them.",
    not_judged=lambda expect, device: "gradients are not clipped" if expect.case.train.max_norm is None else "",
)
def check_clipping(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Does the optimizer get gradients of the norm that the case clips to?

    The norm that the target reports is taken before clipping, the harness sums the norm of what the optimizer gets.
    """
    max_norm = case.train.max_norm
    assert max_norm is not None, "only of cases that clip gradients"
    steps = [(step, trace.rank) for trace in run.by_rank for step in trace.steps]
    wrong = [(step, rank) for step, rank in steps if not _is_clipped(step, max_norm, rounding_of_norm(case))]
    if wrong:
        step, _ = min(wrong, key=lambda pair: pair[0].step)
        expected, reported = _clipped_norm(step, max_norm), step.reported_grad_norm
        of_ranks = (other.reported_grad_norm for other, _ in steps if other.step == step.step)
        norms = sorted({norm for norm in of_ranks if norm is not None})
        finding = NOT_CLIPPED.finding(
            step=step.step,
            expected=f"a norm of at most {max_norm:g}" if expected is None else f"a norm of {expected:.9g}",
            found=f"{step.grad_norm:.9g}",
            max_norm=max_norm,
            reported="no norm is reported" if reported is None else f"the reported norm is {reported:.6g}",
            norm=step.grad_norm,
            notes=[f"ranks clip by different norms, {norms[0]:.6g} to {norms[-1]:.6g}"] if len(norms) > 1 else (),
        )
        yield about_ranks(finding, [rank for other, rank in wrong if other.step == step.step], run)


def _clipped_norm(step: StepTrace, max_norm: float) -> float | None:
    """Return the norm after clipping; None if the target reports none."""
    norm = step.reported_grad_norm
    return None if norm is None else norm * min(1.0, max_norm / (norm + _EPS))


def _is_clipped(step: StepTrace, max_norm: float, rounding: float) -> bool:
    expected = _clipped_norm(step, max_norm)
    if expected is None:
        return step.grad_norm <= max_norm * (1 + rounding)
    return abs(step.grad_norm - expected) <= rounding * expected  # NaN is wrong


# Evaluation

_evaluation = Rules("evaluation", Stage.STEP)
OTHER_LOSS = _evaluation(
    "loss", "the evaluation's loss differs from the training loss of the same batch and weights", numeric=True
)


@_evaluation.judged_by(
    blind="Modules that compute the same wrong loss in both modes; the loss of training is compared by other checks.",
    not_judged=lambda expect, device: "" if expect.case.train.evaluate else "nothing is evaluated",
)
def check_evaluation(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Is the loss of a batch in evaluation the one that training on it then has?

    Between the two no weight changes, and no module of a Llama does anything else in evaluation mode, so every bit is
    the same, but for those of a mean that is made in another order.
    """
    steps = [(step, trace.rank) for trace in run.by_rank for step in trace.steps]
    losses = ((step, rank, step.evaluation_loss) for step, rank in steps)
    wrong = [(step, rank) for step, rank, loss in losses if loss is None or not _is_loss(loss, step, case)]
    if wrong:
        step, _ = min(wrong, key=lambda pair: pair[0].step)
        evaluation_loss = step.evaluation_loss
        size = None if evaluation_loss is None else size_of_error("loss", evaluation_loss, step.loss)
        finding = OTHER_LOSS.finding(step=step.step, expected=repr(step.loss), found=repr(evaluation_loss), size=size)
        yield about_ranks(finding, [rank for other, rank in wrong if other.step == step.step], run)


def _is_loss(evaluated: float, step: StepTrace, case: Case) -> bool:
    """Return True for the loss of a step, or for the same mean where the sum is divided instead of its parts.

    torchtitan trains with the one and validates with the other, which rounds nothing if the number of labels is a power
    of two. A part is what a rank has of a microbatch: each is divided once, and added in both.
    """
    train, parts = case.train, case.layout.batches * case.train.accumulation
    if same_number(evaluated, step.loss):
        return True
    labels = sum(train.labels_of(sequence, step.step) for sequence in range(train.global_batch))
    if case.target == REFERENCE or labels.bit_count() == 1:
        return False
    row = "evaluation.float64" if train.dtype == "float64" else "evaluation.float32"
    return keeps(abs(evaluated - step.loss), Limit(row, (2 * parts - 1) * abs(step.loss)))
