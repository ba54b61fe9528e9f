"""Local parity: does every module compute what one rank computes from the same operands?

Parity follows whole trajectories, which FP8 rounding drives apart where ranks sum in another order. Here every module
is checked by itself (`worker/one_rank/replay.py`), so that the limits are those of rounding: bit for bit, or well
below 2 %.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from harness.checks.assembly import nan_as_inf
from harness.checks.check import Rules, Stage, Witnesses, about_ranks
from harness.checks.comparison import Compared, first_wrong, numbers
from harness.checks.failures import unfinished
from harness.checks.parity import FLOAT32_LOSS
from harness.expect.expectations import Expectations
from harness.expect.model import Model
from harness.expect.module_replay import Bits, allowed_distance, sums_before
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.layout import DP_AXES
from harness.matrix.numerics import Numerics, replayed_steps
from harness.promises import Limit
from harness.text import format_numbers, format_ranks
from harness.trace import Run
from harness.trace.model import ModuleDistance, SumTerms
from harness.verdict import Finding, Value

_NOUNS = {
    "input": "input",
    "output": "output",
    "grad_output": "gradient of the output",
    "grad_input": "gradient of the input",
    "grad": "gradient",
    "param": "value after the optimizer step",
}


Judged = tuple[ModuleDistance, float]  # a tensor, and how far it may be from its replay

_rule = Rules("module_replay", Stage.MODULE, only={"a damaged trace": "nothing-compared"})
NO_REPLAY = _rule.no_reference()
NOTHING_COMPARED = _rule("nothing-compared", "no module was compared")
INCOMPARABLE = _rule(
    "incomparable",
    "the {tensor} of {module} cannot be compared with its replay: {problem} (the first of {count})",
    located=True,
    key=("tensor",),
)
TENSOR = _rule(
    "tensor",
    "the {tensor} of {module}{part} differs from its replay on one rank with the same operands: relative error "
    "{distance:.2g}, tolerance {allowed:.2g} ({count} of {compared} tensors of this step)",
    located=True,
    numeric=True,
    key=("tensor",),
)
SUM = _rule(
    "sum",
    "the output of {module} is not the sum over tp that {consumer} needs: {ended}",
    located=True,
    numeric=True,
    key=("ended",),
)
_OFF = " does not follow from the recorded {source}: relative error {distance:.2g}, tolerance {allowed:.2g}"
LOSS = _rule("loss", "{number}" + _OFF, numeric=True)
NORM = _rule("grad-norm", "{number}" + _OFF, numeric=True)


def _partly(expect: Expectations, device: str) -> str:
    replayed = replayed_steps(expect.case, expect.numerics)
    left = sorted({*range(1, expect.case.train.steps + 1)} - {*replayed}) if replayed else []
    if not left:
        return ""
    later = [step for step in replayed if step - 1 in left]  # the optimizer has the state of another step
    updates = f", and the update{'s' * (len(later) > 1)} of {format_numbers('step', later)}" if later else ""
    return f"{format_numbers('step', left)}{updates}: modules are recorded in {len(replayed)} steps"


@_rule.judged_by(
    blind="Bugs outside of modules, such as the order of microbatches; steps that are not replayed.",
    partly=_partly,
    records=("module_tensors",),
    checks_counterpart=True,
)
def check_module_replay(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every module compute what one rank computes from the same operands?"""
    expect = witnesses.expect
    relation = expect.relation
    if relation is not None and expect.stands_for_modules:
        findings = _judged(relation.partner, run, witnesses.partner, expect.numerics)
        return [replace(finding, within=f"in {case_id(relation.partner)}") for finding in findings]
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
    same, ordered = numerics.same_in_parts, numerics.has_one_order
    same = same and all("scaled_mm" in trace.virtual for trace in run.traces)
    reduced = all(ordered(case.layout.mesh[axis]) for axis in DP_AXES)
    bits = Bits(same, summed=ordered(case.layout.tp), reduced=reduced, shared=ordered(case.layout.cp))
    allowed = partial(allowed_distance, case, bits=bits, model=model)
    for step in replayed_steps(case, numerics):
        tensors = [tensor for tensor in distances if tensor.step == step]
        sums = sums_before(tensors, () if model is None else model.converted)
        judged = [(tensor, allowed(tensor, sums=before)) for tensor, before in zip(tensors, sums, strict=True)]
        reported = _numbers(run, replay, step) if with_numbers else []
        findings = [*_not_compared(run, judged, step), *_too_far(run, judged), *reported]
        if findings:
            return findings
    return []


def _not_compared(run: Run, judged: Sequence[Judged], step: int) -> Iterator[Finding]:
    if not judged:
        yield NOTHING_COMPARED.finding(step=step, expected="distances")
    broken = [pair for pair in judged if pair[0].problem is not None]
    if broken:
        first, limit = broken[0]
        off = [rank for rank, distance in first.of_ranks.items() if distance > limit]
        unequal = [rank for rank, distance in first.of_ranks.items() if math.isnan(distance)]
        ranks = () if off and unequal else off or unequal  # where one is off, whether others are too is not known
        values: dict[str, Value] = {"tensor": _NOUNS[first.kind], "problem": first.problem or "", "count": len(broken)}
        finding = INCOMPARABLE.finding(step=step, module=first.fqn, found=first.problem, values=values)
        yield about_ranks(finding, ranks, run) if first.terms is None else _not_summed(run, first, [first])


def _too_far(run: Run, judged: Sequence[Judged]) -> Iterator[Finding]:
    """Yield the first tensor that is too far off, in the order of execution: no other can be the reason for it."""
    compared = [
        Compared(TENSOR, tensor.step, tensor.distance, limit, tensor.fqn, of=tensor)
        for tensor, limit in judged
        if tensor.problem is None
    ]
    wrong = first_wrong(compared)
    if wrong is None:
        return
    first: ModuleDistance = wrong.told.of
    if first.terms is not None:
        yield _not_summed(run, first, [one.of for one in wrong.together])
        return
    ranks = [rank for rank, distance in first.of_ranks.items() if not distance <= wrong.told.allowed]
    is_whole, parts = len(ranks) == len(first.of_ranks), {one.of.part for one in compared} - {None}
    part = "" if first.part is None or len(parts) < 2 else f" on data-parallel rank {first.part}"
    if ranks and not is_whole:
        part += f", {'partial' if first.parts > 1 else 'shard'} of {format_ranks(ranks)},"
    finding = wrong.finding(tensor=_NOUNS[first.kind], part=part, ranks=() if is_whole else ranks)
    yield about_ranks(finding, ranks, run) if is_whole and len(ranks) == len(run.traces) else finding


def _not_summed(run: Run, first: ModuleDistance, wrong: Sequence[ModuleDistance]) -> Finding:
    """Return the finding about the module whose outputs ranks add up wrongly, of which `first` is the sum."""
    terms = first.terms
    assert terms is not None, "it is about a sum"
    place = (first.fqn, first.call, first.kind)
    alike = [tensor.terms for tensor in wrong if (tensor.fqn, tensor.call, tensor.kind) == place and tensor.terms]
    ranks = {rank for sum_terms in alike for rank, times in sum_terms.weights.items() if any(one != 1 for one in times)}
    ended, expected = _sum_instead(terms), f"the sum of what {format_ranks(terms.ranks)} computed"
    values: dict[str, Value] = {"ended": ended, "consumer": first.fqn}
    size, module = nan_as_inf(first.distance), terms.fqn
    finding = SUM.finding(
        step=first.step, module=module, operand="output", expected=expected, found=ended, size=size, values=values
    )
    return about_ranks(finding, ranks, run)


def _sum_instead(terms: SumTerms) -> str:
    times = {one for multiples in terms.weights.values() for one in multiples}
    (first, *_), count = times, len(terms.ranks)
    if len(times) == 1:
        is_mean = abs(first * count - 1) <= Limit("parity.terms")
        return "it is averaged instead of summed" if is_mean else f"it is {first:g} times the sum"
    own = {rank: tuple(float(rank == other) for other in terms.ranks) for rank in terms.weights}
    if all(own[rank] == multiples for rank, multiples in terms.weights.items()):
        return "ranks continue with their local result"
    rank, weights = next((rank, multiples) for rank, multiples in terms.weights.items() if set(multiples) != {1.0})
    shown = " + ".join(f"{one:g} x rank {of}" for of, one in zip(terms.ranks, weights, strict=True))
    return f"rank {rank} goes on with {shown}"


def _numbers(run: Run, replay: Run, step: int) -> list[Finding]:
    """Return what ranks report, against the loss of the recorded logits and the norm of the recorded gradients."""

    def of_norm(_: int, norm: float) -> Limit:
        return Limit("modules.grad_norm", norm)

    expected = next(replayed for replayed in replay.traces[0].steps if replayed.step == step)
    return [
        *numbers(LOSS, run, "loss", {step: expected.loss}, lambda *_: FLOAT32_LOSS, source="logits"),
        *numbers(NORM, run, "grad_norm", {step: expected.grad_norm}, of_norm, source="gradients"),
    ]
