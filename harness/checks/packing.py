"""Do packed documents have the loss that each of them has alone, without the others and without padding?

The single-rank reference trains the same packed sequences with the same code, so it shares a wrong mask, wrong
positions and labels of padding. Documents alone have no mask, and no padding.
"""

from msgspec.structs import replace

from harness.checks import assembly
from harness.checks.check import Rules, Stage, Witnesses, finished
from harness.checks.comparison import numbers
from harness.checks.parity import FLOAT32_LOSS, allowed_distance
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.promises import Limit
from harness.registry import attends_apart
from harness.trace import Run
from harness.verdict import Finding

_rule = Rules("packing", Stage.SAME_LAYOUT, only={"a damaged trace": "nothing-compared"})
NOTHING_COMPARED = _rule("nothing-compared", "no document was evaluated alone")
_OFF = " of packed documents is {distance:.2g} off the one without packing on one rank, tolerance {allowed:.2g}"
_FIX = (
    "let a token attend to its own document alone, begin positions again with each, and leave padding and the last "
    "token of each out of the loss."
)
LOSS = _rule("loss", "the loss" + _OFF, numeric=True, fix=_FIX)
GRAD_NORM = _rule("grad-norm", "the gradient norm" + _OFF, numeric=True, fix=_FIX)


def _not_judged(expect: Expectations, device: str) -> str:
    if expect.case.train.packing == "none":
        return "sequences are not packed"
    apart = expect.case.float8.traits.keeps_tokens_apart("forward")
    return "" if apart else "a scale is of several tokens, and a document alone has another one"


@_rule.judged_by(
    blind="Recipes with a scale of several tokens, gradients where one of theirs is; steps behind the first.",
    not_judged=_not_judged,
    records=("sketches",),
)
def check_packing(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Do packed documents have the loss that each of them has alone, without padding?"""
    solo, tolerance = finished(witnesses.solo), witnesses.parity_tolerance
    if solo is None or tolerance is None:
        return []  # as parity says
    alone = solo.traces[0].documents_alone
    if alone is None:
        return [NOTHING_COMPARED.finding(expected="the loss of documents alone")]
    norms = {} if alone.grad_norm is None else {1: alone.grad_norm}
    far = allowed_distance(case, tolerance, 1)
    of_norm = max(far, 0.0 if case.train.dtype == "float64" else Limit("packing.grad_norm"))
    findings = [
        *numbers(LOSS, run, "loss", {1: alone.loss}, lambda *_: _allowed_loss(case, far)),
        *numbers(GRAD_NORM, run, "grad_norm", norms, lambda _, norm: of_norm * norm),
    ]
    explained = assembly.explain_loss(case, run, _with_loss(solo, alone.loss), 1, None) if findings else None
    if explained is None:
        return findings
    return [replace(one, notes=(*one.notes, explained.what), fix=explained.fix or one.fix) for one in findings]


def _allowed_loss(case: Case, far: float) -> float:
    """Return how far the loss may be off: as from one rank, and where a mask is another kernel by what that rounds.

    Where attention has no mask it gets documents alone in both runs. In float64 nothing is rounded that shows.
    """
    share = Limit("parity.loss_share", far)
    if case.train.dtype == "float64":
        return share
    return max(share, FLOAT32_LOSS if attends_apart(case.target) else Limit("packing.loss"))


def _with_loss(solo: Run, loss: float) -> Run:
    """Return the reference as if it had this loss in step 1."""
    trace = solo.traces[0]
    first = replace(trace.steps[0], loss=loss)
    return replace(solo, traces=(replace(trace, steps=(first, *trace.steps[1:])),))
