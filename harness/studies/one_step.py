"""One step each of what training loops get wrong: two microbatches, clipping that bites, unequal labels.

They train without FP8 in the sharpest dtype, so the loss of a batch does not depend on how it is split, beyond the
order of sums. That finds mistakes which the single-rank reference shares: it has the microbatches of all ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from harness.checks.assembly import OVER_ALL_LABELS, labels_of_ranks
from harness.checks.check import Rule, Stage
from harness.checks.failures import refusal_words
from harness.matrix.case import Case, Checks, Dtype, Layout, Train
from harness.matrix.caseid import case_id, layout_id
from harness.matrix.rules import exclusions
from harness.registry import is_llama
from harness.result import CaseResult
from harness.verdict import Finding, Verdict

MAX_NORM = 0.01  # bites: gradients of the smallest models here have a norm of 0.3
COARSE = 0.05  # nats from the golden in bfloat16: what is compared here is sharper, and no tolerance is derived
# Relative, of sums in another order: below 3e-16 and 6e-8 in the toy of tests.
ALLOWED = {"float64": 1e-9, "float32": 1e-5}
WHOLE, SPLIT, CLIPPED, LABELS = "one microbatch", "two microbatches", "clipping", "unequal labels"
OPTIONS: Mapping[str, dict[str, Any]] = {
    WHOLE: {},
    SPLIT: {"accumulation": 2},
    CLIPPED: {"max_norm": MAX_NORM},
    LABELS: {"ignored_tokens": "unequal"},
}

DEPENDS = Rule(
    name="batch/split",
    says="the {number} of a batch is {value} on {layout} with {shows}, {whole} on one rank in one microbatch: {why}",
    stage=Stage.ONE_RANK,
    numeric=True,
)


class OneStep(NamedTuple):
    """What one of these cases shows. `refused`: why the target does not take it."""

    label: str  # "fsdp2 with two microbatches"
    result: CaseResult
    refused: str | None


def one_step_cases(base: Case, layouts: Sequence[Layout], dtype: Dtype) -> dict[str, tuple[str, Case]]:
    """Return what they show and the cases, by id, on one rank and in the first layout with several batches.

    None for models whose formulas are known; none that a rule excludes.
    """
    if is_llama(base.target) or not layouts:
        return {}
    first = min(layouts, key=lambda layout: (layout.dp == 1, layout.world_size == 1))
    kept = {name: getattr(base.train, name) for name in ("global_batch", "seq_len", "seed", "lr", "optimizer")}
    whole = Case(target=base.target, model=base.model, checks=Checks(loss_tolerance=COARSE))
    plan = [(Layout(), WHOLE), (first, SPLIT), (first, CLIPPED), (Layout(), LABELS), (first, LABELS)]
    trains = {shows: Train(steps=1, dtype=dtype, **kept, **options) for shows, options in OPTIONS.items()}
    made = [(shows, replace(whole, layout=layout, train=trains[shows])) for layout, shows in plan]
    return {case_id(case): (shows, case) for shows, case in made if not exclusions(case)}


def judged_one_step(cases: Mapping[str, tuple[str, Case]], results: Iterable[CaseResult]) -> dict[str, OneStep]:
    """Return what these cases show, by id, with a finding where a loss or norm depends on how the batch is split."""
    ran, looked = {result.case_id: result for result in results if result.case_id in cases}, {}
    of_one = {name: shows for name, (shows, case) in cases.items() if shows in (WHOLE, LABELS) and case.world_size == 1}
    whole = {of_one[name]: result for name, result in ran.items() if name in of_one}
    taken, sound = set[str](), False  # sound: nothing changes with the split where every token has a label
    for name, result in ran.items():
        shows, case = cases[name]
        refused = _refusal(shows, result, whole.get(WHOLE))
        taken |= {shows} if refused is None else set()
        compared = shows in taken if shows != CLIPPED else SPLIT not in taken  # ranks split a batch too
        other = _other_number(shows, case, result, whole.get(shows, whole.get(WHOLE)), sound) if compared else None
        sound |= compared and shows in (SPLIT, CLIPPED) and other is None and not _others(result)
        judged, label = result, f"{layout_id(case.layout)} with {shows}"
        if other is not None:
            verdict, refused = Verdict.NUMERIC if result.verdict.good else result.verdict, None
            judged = replace(result, verdict=verdict, findings=(other, *result.findings))
        looked[name] = OneStep(label, judged, refused)
    return looked


def _refusal(shows: str, result: CaseResult, whole: CaseResult | None) -> str | None:
    """Return what the target lacks for this case; None if it takes it."""
    if shows == LABELS and (lacking := [end.message for end in result.failures if "takes no labels" in end.message]):
        return lacking[0].partition(": ")[2].partition(",")[0]
    norms = (*result.grad_norms, *(whole.grad_norms if whole is not None else ()))
    if shows == CLIPPED and len(norms) == 2 and math.isclose(*norms, rel_tol=1e-6):
        return "gradients are the same without case.train.max_norm"
    return refusal_words(result.failures, any_error=True)


def _others(result: CaseResult) -> bool:
    """Return True if anything but clipping is wrong."""
    return any(finding.check != "clipping" for finding in result.findings)


def _other_number(
    shows: str, case: Case, result: CaseResult, whole: CaseResult | None, of_labels: bool
) -> Finding | None:
    """Return a finding where all ranks agree on a loss, or a norm, that one rank in one microbatch does not have."""
    if whole is None or not result.losses or not whole.losses:
        return None
    pairs = {"loss": (result.losses[0], whole.losses[0]), "gradient norm": (result.grad_norms[0], whole.grad_norms[0])}
    apart = {number: abs(found - expected) / (abs(expected) or 1.0) for number, (found, expected) in pairs.items()}
    numbers = ["loss"] if shows == CLIPPED else [*apart]
    wrong = [number for number in numbers if not apart[number] <= ALLOWED[case.train.dtype]]  # NaN is wrong
    if not wrong or (_others(result) and (shows != LABELS or not of_labels)):
        return None  # what other checks find too says more, unless it is the labels alone
    found, expected = pairs[wrong[0]]
    if shows == LABELS and of_labels:
        why = f"it is a mean over the labels of each rank or microbatch, not over all; {labels_of_ranks(case)}"
    elif wrong[0] == "loss":
        why = "it is a mean over the labels of each rank or microbatch, of which the target leaves some out, instead "
        why += "of all, or the sequences of a batch change one another in the model"
    else:
        why = f"gradients are summed or divided differently when the batch is split, {found / expected:.6g} times"
    fix = OVER_ALL_LABELS if shows == LABELS and of_labels else None
    values = {"number": wrong[0], "value": f"{found:.7g}", "whole": f"{expected:.7g}", "why": why}
    values |= {"layout": layout_id(case.layout), "shows": shows}
    size = apart[wrong[0]]
    return DEPENDS.finding(step=1, fix=fix, expected=repr(expected), found=repr(found), size=size, values=values)
