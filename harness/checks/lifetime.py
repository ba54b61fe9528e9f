"""Is what a matmul reads of this step, and of this microbatch?

Casts, scales and copies of weights are of the step that they were made in: an optimizer that updates a weight ends
their life. Those of activations and gradients are of one microbatch. Numbers are not looked at: what is kept for too
long is wrong in the step in which a weight moves far enough to show it.
"""

from collections.abc import Iterator
from functools import partial

from harness.checks.check import Check, Witnesses
from harness.checks.findings import Mismatch, findings_by_rule, traces_by_rank
from harness.checks.rule import Rule, Rules, Stage
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.operands import Aged
from harness.verdict import Finding

_rule = Rules("lifetime", Stage.SCALES, located=True)
CAST = _rule("cast", "a matmul reads a weight that was cast before its last update")
COPY = _rule("copy", "a weight is cast from a copy that is older than its last update")
SCALE = _rule("scale", "the scale of a weight is older than its last update")
MICROBATCH = _rule("microbatch", "a matmul reads what was cast in another microbatch or step")
OTHER_SCALE = _rule("other-scale", "a scale is used that was made for another tensor")
GATHERED = _rule("gathered", "FSDP2 still holds the whole weight after the step", stage=Stage.MODEL)


def _not_judged(expect: Expectations, device: str) -> str:
    if not expect.case.float8.enabled:
        return "nothing is cast to float8"
    return "" if expect.case.compile == "none" else "casts in generated code have no memory of their own"


@partial(
    Check,
    declares=_rule,
    blind="High-precision activations; weights that FSDP2 gathered, whose rows `scales` compares; grouped matmuls.",
    not_judged=_not_judged,
    records=("operands",),
)
def check_lifetime(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is what a matmul reads of this step, and of this microbatch: casts, scales, and copies of weights?"""
    return findings_by_rule(mismatch for trace in traces_by_rank(run) for mismatch in _mismatches(trace))


def _mismatches(trace: RankTrace) -> Iterator[Mismatch]:
    assert trace.operands is not None
    for kept in trace.operands.kept:
        yield Mismatch(kept.step, 0, trace.rank, kept.fqn, GATHERED, "its shard alone", "the whole weight", kept.name)
    updated = {step.step for step in trace.steps if step.optimizer_steps != 0}
    for aged in trace.operands.aged:
        rule = _broken(aged, updated)
        if rule is not None:
            operand = f"{aged.role} in {aged.where}"
            expected = _time(aged, aged.step, aged.microbatch, aged.where)
            found = _time(aged, aged.first_step, aged.first_microbatch, aged.first_phase)
            if rule is OTHER_SCALE or aged.fqn != aged.first_fqn:
                found += f", {aged.first_role} of {aged.first_fqn}"
            yield Mismatch(aged.step, aged.index, trace.rank, aged.fqn, rule, expected, found, operand)


def _broken(aged: Aged, updated: set[int]) -> Rule | None:
    """None for what is of an earlier step although no weight was updated since."""
    if aged.what == "other_scale":
        return OTHER_SCALE
    if aged.role != "weight":
        return MICROBATCH
    if updated.isdisjoint(range(aged.first_step, aged.step)):
        return None
    return {"data": CAST, "source": COPY, "scale": SCALE}[aged.what]


def _time(aged: Aged, step: int, microbatch: int, where: str) -> str:
    of_step = f"of the evaluation of step {step}" if where == "evaluation" else f"of step {step}"
    return of_step + (f", microbatch {microbatch}" if microbatch and aged.role != "weight" else "")
