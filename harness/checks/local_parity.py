"""Local parity: does every module compute what one rank computes from the same operands?

Parity follows whole trajectories, which FP8 rounding drives apart where ranks sum in another order. Here every module
is judged by itself (`worker/replay.py`), so that the limits are those of rounding: bit for bit, or well below 2 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from harness.checks.assembly import nan_as_inf
from harness.checks.check import Check, Witnesses, unfinished
from harness.checks.parity import FLOAT32_LOSS, wrong_numbers
from harness.checks.rule import Rules, Stage
from harness.expect.expectations import Expectations
from harness.expect.local_parity import Bits, allowed_distance
from harness.expect.model import Model
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.layout import DP_AXES
from harness.matrix.numerics import Numerics, replayed_steps
from harness.sentence import format_numbers
from harness.trace import Run
from harness.trace.tensors import ModuleDistance
from harness.verdict import Finding

# The norm is a sum in float64 of the same gradients.
GRAD_NORM = 1e-9

_NOUNS = {
    "input": "input",
    "output": "output",
    "grad_output": "gradient of the output",
    "grad_input": "gradient of the input",
    "grad": "gradient",
    "param": "value after the optimizer step",
}


_rule = Rules("local_parity", Stage.MODULE)
NO_REPLAY = _rule.no_witness()
NOTHING_COMPARED = _rule("nothing-compared", "no module was compared")
INCOMPARABLE = _rule(
    "incomparable",
    "the {tensor} of {module} cannot be compared with its replay: {problem} (the first of {count})",
    located=True,
    key=("tensor",),
)
TENSOR = _rule(
    "tensor",
    "the {tensor} of {module}{part} is not what one rank computes from the same operands: relative distance "
    "{distance:.2g}, {allowed:.2g} allowed ({count} of {compared} tensors of this step)",
    located=True,
    numeric=True,
    key=("tensor",),
)
_OFF = " does not follow from the recorded {source}: off by {distance:.2g}, {allowed:.2g} allowed"
LOSS = _rule("loss", "{number}" + _OFF, numeric=True)
NORM = _rule("grad-norm", "{number}" + _OFF, numeric=True)


def _partly(expect: Expectations, device: str) -> str:
    replayed = replayed_steps(expect.case, expect.numerics)
    left = sorted({*range(1, expect.case.train.steps + 1)} - {*replayed}) if replayed else []
    if not left:
        return ""
    later = [step for step in replayed if step - 1 in left]  # the state of the optimizer is that of another step
    updates = f", and the update{'s' * (len(later) > 1)} of {format_numbers('step', later)}" if later else ""
    return f"{format_numbers('step', left)}{updates}: modules are recorded in {len(replayed)} steps"


@partial(
    Check,
    declares=_rule,
    blind="What no module computes, such as the order of microbatches; steps that are not replayed.",
    partly=_partly,
    records=("module_tensors",),
    judges_partner=True,
)
def check_local_parity(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every module compute what one rank computes from the same operands?"""
    expect = witnesses.expect
    relation = expect.relation
    if relation is not None and expect.stands_for_modules:
        found = _judged(relation.partner, run, witnesses.partner, expect.numerics)
        return [replace(each, within=f"in {case_id(relation.partner)}") for each in found]
    model = None if expect.has_formulas else expect.model
    return _judged(case, run, witnesses.replay, expect.numerics, with_numbers=True, model=model)


def _judged(
    case: Case,
    run: Run,
    replay: Run | None,
    numerics: Numerics,
    *,
    with_numbers: bool = False,
    model: Model | None = None,
) -> list[Finding]:
    """`replay` has the distances of the modules of `case`, and for `with_numbers` the loss and the norm of `run`."""
    if replay is None or not replay.complete:
        return [unfinished(NO_REPLAY, "the replay of the modules", replay, run)]
    distances = replay.traces[0].module_distances or ()
    same = numerics.same_in_parts and all("scaled_mm" in trace.virtual for trace in run.traces)
    mesh = case.layout.mesh
    bits = Bits(
        same=same,
        summed=numerics.has_one_order(case.layout.tp),
        reduced=all(numerics.has_one_order(mesh[axis]) for axis in DP_AXES),
    )
    for step in replayed_steps(case, numerics):
        found = [each for each in distances if each.step == step]
        numbers = _numbers(run, replay, step) if with_numbers else []
        findings = [*_not_compared(found, step), *_too_far(case, found, bits, model), *numbers]
        if findings:
            return findings
    return []


def _not_compared(found: Sequence[ModuleDistance], step: int) -> Iterator[Finding]:
    if not found:
        yield NOTHING_COMPARED.finding(step=step, expected="distances")
    broken = [each for each in found if each.problem is not None]
    if broken:
        yield INCOMPARABLE.finding(
            tensor=_NOUNS[broken[0].kind],
            problem=broken[0].problem or "",
            count=len(broken),
            step=step,
            module=broken[0].fqn,
            found=broken[0].problem,
        )


def _too_far(case: Case, found: Sequence[ModuleDistance], bits: Bits, model: Model | None) -> Iterator[Finding]:
    """The first tensor that is too far off, in the order of execution: no other can be the reason for it."""
    compared = [each for each in found if each.problem is None]
    limits = [allowed_distance(case, each, bits=bits, model=model) for each in compared]
    wrong = [pair for pair in zip(compared, limits, strict=True) if not pair[0].distance <= pair[1]]  # NaN is wrong
    if wrong:
        first, limit = wrong[0]
        part = "" if first.part is None or case.layout.dp == 1 else f" on data-parallel rank {first.part}"
        if first.rank is not None:
            part += f", {'partial' if first.parts > 1 else 'shard'} of rank {first.rank},"
        yield TENSOR.finding(
            tensor=_NOUNS[first.kind],
            part=part,
            distance=first.distance,
            allowed=limit,
            count=len(wrong),
            compared=len(compared),
            step=first.step,
            rank=first.rank,
            module=first.fqn,
            expected=f"distance <= {limit:.2g}",
            found=f"{first.distance:.2g}",
            size=max(nan_as_inf(each.distance) for each, _ in wrong),
        )


def _numbers(run: Run, replay: Run, step: int) -> list[Finding]:
    """What ranks report, against the loss of the recorded logits and the norm of the recorded gradients."""
    expected = next(each for each in replay.traces[0].steps if each.step == step)
    norm = expected.grad_norm
    return [
        *wrong_numbers(LOSS, run, step, "loss", expected=expected.loss, allowed=FLOAT32_LOSS, source="logits"),
        *wrong_numbers(NORM, run, step, "grad_norm", expected=norm, allowed=GRAD_NORM * norm, source="gradients"),
    ]
