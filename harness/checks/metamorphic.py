"""Does a case compute what its counterpart computes, and do what it did when its profile was recorded?

The single-rank reference cannot answer this sharply where a layout sums in another order, because rounding hides
differences. The counterpart is the same case without options that must be neutral: it has the same layout, so its
results must match bit for bit. Which options are neutral is stated in `expect/relations.py`. A profile is what a run
of a case sent, multiplied and kept, for models that no formula describes.
"""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from harness.checks.assembly import SketchKey, assemble, relative_distances, sketched
from harness.checks.check import Rules, Stage, Witnesses, finished, first_of_each, merge_ranks
from harness.checks.comparison import Compared, first_wrong, numbers
from harness.checks.failures import unfinished
from harness.evidence.profile import Profile, is_memory, seen_in
from harness.expect.expectations import Expectations
from harness.expect.memory import describes
from harness.expect.relations import Relation
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.numerics import async_tp_gap
from harness.trace import RankTrace, Run
from harness.trace.model import TensorSketch
from harness.verdict import Finding, Value

_rule = Rules("metamorphic", Stage.SAME_LAYOUT, only={"a damaged trace": "nothing-compared one-side"})
NO_PARTNER = _rule.no_reference()
_DIFFERS = "{noun} differ from {partner}; worst {module}: relative error {distance:.2g}"
LOSS = _rule("loss", "loss differs from {partner}", numeric=True)
GRAD_NORM = _rule("grad-norm", "grad norm differs from {partner}", numeric=True)
NOTHING_COMPARED = _rule("nothing-compared", "no gradients were compared: {partner} recorded none")
ONE_SIDE = _rule(
    "one-side",
    "not recorded both here and by {partner}: {kind} of {module}, {side} (the first of {count})",
    key=("kind",),
)
GRADIENTS = _rule("gradients", "{count} of {compared} " + _DIFFERS, numeric=True)
PARAMETERS = _rule("parameters", "{count} of {compared} " + _DIFFERS, numeric=True)


@_rule.judged_by(
    blind="A fault that both have, such as one of the layout or of the recipe.",
    not_judged=lambda expect, device: async_tp_gap(expect.case, expect.numerics) or "",
    records=("sketches",),
    needs_relation=True,
)
def check_metamorphic(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does a case compute what the same case without its neutral options computes, bit for bit?"""
    relation, partner = witnesses.expect.relation, finished(witnesses.partner)
    if relation is None:
        return []
    if partner is None:
        return [unfinished(NO_PARTNER, _partner(relation), witnesses.partner, run)]
    return [*_reported_numbers(relation, run, partner), *_tensors(relation, run, partner)]


def _reported_numbers(relation: Relation, run: Run, partner: Run) -> Iterator[Finding]:
    """Yield the first step with a different loss or gradient norm. Steps that are missing are reported by `finite`.

    Where async TP is what the counterpart lacks, the operators that it fused are to be looked at.
    """
    for name, rule in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
        expected = {step.step: getattr(step, name) for step in partner.traces[0].steps}
        for finding in numbers(rule, run, name, expected, lambda *_: 0.0):
            values = {**finding.values, "partner": _promise(relation)}
            yield replace(finding, operand=_fused(relation, run), values=values)


def _fused(relation: Relation, run: Run) -> str:
    """Return the operators that async TP fused, where the counterpart has none; empty for any other relation."""
    if relation.partner.layout.async_tp or "async_tp" not in relation.name:
        return ""
    graphs = (trace.graphs for trace in run.traces if trace.graphs is not None)
    return ", ".join(sorted({call.operator for recorded in graphs for call in recorded.calls}))


def _tensors(relation: Relation, run: Run, partner: Run) -> Iterator[Finding]:
    found, expected = ({key for key, _ in _shards(one)} for one in (run, partner))
    if not expected:
        yield NOTHING_COMPARED.finding(partner=_partner(relation), expected="sketches")
    for key in sorted(found ^ expected)[:1]:
        side, count = "here only" if key in found else "there only", len(found ^ expected)
        values: dict[str, Value] = {"partner": _partner(relation), "kind": key.kind, "side": side, "count": count}
        yield ONE_SIDE.finding(step=key.step, module=key.fqn, values=values)
    compared = [tensor for tensor in _bits(run, partner) if tensor.of in found & expected]
    wrong = first_wrong(sorted(compared, key=lambda tensor: tensor.of), worst=True)
    if wrong is not None:
        noun = {"initial": "initial weights", "grad": "gradients", "param": "final parameters"}[wrong.told.kind]
        count, rank = len({tensor.of for tensor in wrong.together}), next(iter(wrong.told.ranks), None)
        every = len({tensor.of for tensor in compared if tensor.of[:2] == wrong.told.of[:2]})
        yield wrong.finding(noun=noun, partner=_promise(relation), count=count, compared=every, rank=rank)


def _bits(run: Run, partner: Run) -> Iterator[Compared]:
    """Yield shards of a rank beside those of the same rank of the counterpart: what is not finite equals nothing."""
    found, expected = _shards(run), _shards(partner)
    same = {place: _same_bits(found[place], expected.get(place)) for place in sorted(found)}
    distances = {} if all(same.values()) else relative_distances(assemble(run.traces), assemble(partner.traces))
    for (key, rank), equal in same.items():
        rule, distance = GRADIENTS if key.kind == "grad" else PARAMETERS, 0.0 if equal else distances.get(key, math.nan)
        texts = {"expected": _text(expected.get((key, rank))), "found": _text(found[key, rank])}
        yield Compared(rule, key.step, distance, 0.0, key.fqn, key.kind, (rank,), of=key, same=equal, **texts)


def _same_bits(shard: TensorSketch, other: TensorSketch | None) -> bool:
    """Return True for equal bits at the same offset. NaN never equals anything, itself included."""
    if other is None or not math.isfinite(shard.norm_squared):
        return False
    return (shard.digest, shard.offset, shard.local_shape) == (other.digest, other.offset, other.local_shape)


def _text(shard: TensorSketch | None) -> str:
    return "nothing" if shard is None else f"{list(shard.local_shape)} at {list(shard.offset)}: {shard.digest}"


def _shards(run: Run) -> dict[tuple[SketchKey, int], TensorSketch]:
    return {(key, rank): sketch for key, rank, sketch in sketched(run.traces)}


def _partner(relation: Relation) -> str:
    return f"the counterpart {case_id(relation.partner)} ({relation.name})"


def _promise(relation: Relation) -> str:
    return f"{_partner(relation)}, which must match bit for bit"


_profile = Rules("profile", Stage.COLLECTIVES, only={"an own target": "executed memory"})
_SAYS = "number or size of {what} differs from the recorded profile"
EXECUTED = _profile("executed", _SAYS, key=("what",))
MEMORY = _profile("memory", _SAYS, stage=Stage.MEMORY, key=("what",))


def _no_profile(expect: Expectations, device: str) -> str:
    if expect.has_formulas:
        return "formulas cover what the model sends, multiplies and saves"
    return "" if describes(device) else "profiles are recorded on the virtual device"


@_profile.judged_by(
    blind="A bug that was there when the profile was recorded.",
    not_judged=_no_profile,
    records=("traffic", "saved_memory"),
    also_reads=("operands", "graphs"),
    needs_profile=True,
)
def check_profile(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank do what it did when the profile of the case was recorded?

    The first finding names the command by which a change that is intended is recorded.
    """
    profile = witnesses.profile
    assert profile is not None, "without a profile the check is not executed"
    findings = merge_ranks(run, lambda trace: first_of_each(_other_than_recorded(case, profile, trace)))
    note = f"if it is intended, `{witnesses.update_profile}` records it"
    return [*(replace(first, notes=(note,)) for first in findings[:1]), *findings[1:]]


def _other_than_recorded(case: Case, profile: Profile, trace: RankTrace) -> Iterator[Finding]:
    recorded = {record.step for records in (trace.traffic, trace.saved_memory) for record in records or ()}
    for step in sorted({*range(1, case.train.steps + 1), *recorded}):
        expected, found = profile.seen(step=step, rank=trace.rank), seen_in(trace, step)
        for kind in dict.fromkeys((*expected, *found)):
            wanted, got = expected.get(kind, "none"), found.get(kind, "none")
            if wanted != got:
                rule = MEMORY if is_memory(kind) else EXECUTED
                yield rule.finding(what=kind, step=step, expected=f"{wanted}, as recorded", found=got)
