"""Is what is used again the right thing: recomputed casts and matmuls, and operands of another step or microbatch?

When recomputation differs from forward, the gradients belong to a function that was never evaluated, while the loss is
correct. In compiled blocks backward graphs repeat nodes of forward graphs: they must be the same nodes.

Casts, scales and copies of weights are of the step that they were made in: an optimizer that updates a weight ends
their life. Those of activations and gradients are of one microbatch. Numbers are not looked at: what is kept for too
long is wrong in the step in which a weight moves far enough to show it.
"""

from collections.abc import Iterator

from harness.checks.casts import CastKey, casts_by_key, matmuls_by_key
from harness.checks.check import Mismatch, Rule, Rules, Stage, Witnesses, findings_by_rule, merge_ranks
from harness.expect.expectations import MATMULS, Expectations
from harness.matrix.case import Case
from harness.matrix.numerics import has_plain_shards
from harness.matrix.recipes import TENSOR, Operand
from harness.trace import RankTrace, Run
from harness.trace.operands import Aged, CastRecord, MatmulRecord, Role, ScaleSummary
from harness.verdict import Finding

_rule = Rules("recompute", Stage.EXECUTION, only={"an own target": "unasked"})
NODES = _rule("nodes", "{count:n node of backward graphs is|nodes of backward graphs are} not as in forward: {node}")
NOTHING_REPEATED = _rule(
    "nothing-repeated", "backward graphs of checkpointed blocks repeat nothing of forward", stage=Stage.MODEL
)
_DIFFERS = " differs from its first execution{where} in its {property}"
CAST = _rule("cast", f"a cast{_DIFFERS}", located=True, key=("property",))
MATMUL = _rule("matmul", f"a matmul{_DIFFERS}", located=True, key=("property",))
NOT_RECOMPUTED = _rule("not-recomputed", "checkpointed forward was not recomputed", stage=Stage.MODEL, located=True)
UNASKED = _rule("unasked", "forward was recomputed without being asked for")
NUMBER = _rule("number", "wrong number of recomputed matmuls", formula=MATMULS)


# The repetition of a cast or matmul, the first one, and where that was, if that was no training.
_Repetition = tuple[CastRecord | MatmulRecord, CastRecord | MatmulRecord, str]


def _not_judged(expect: Expectations, device: str) -> str:
    case = expect.case
    if has_plain_shards(case) and case.compile != "none":
        return "in backward, a graph reads a plain tensor that was gathered through a copy"
    return ""


@_rule.judged_by(
    blind="What is wrong in the same way both times; operators without float8 in eager recomputation.",
    not_judged=_not_judged,
    records=("operands",),
    compiled_records=("graphs",),
    formula=MATMULS,
    needs_linears=True,
)
def check_recompute(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does everything that runs twice give the same result twice?

    The first mismatch of every rank that has one, with the number of mismatches. Of graphs, once for all ranks.
    """
    expect = witnesses.expect
    if case.compile != "none":
        return merge_ranks(run, lambda trace: _of_graphs(expect, trace))
    of_ranks = ([*_unequal(expect, trace), *_not_recomputed(expect.of(trace.rank), trace)] for trace in run.by_rank)
    firsts = (
        (min(mismatches, key=lambda mismatch: mismatch.place), len(mismatches)) for mismatches in of_ranks if mismatches
    )
    return [first.finding(f"{first.place_words}; {{total}} in total", total=total) for first, total in firsts]


def _of_graphs(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """Yield nodes that backward graphs repeat and change, and checkpointed blocks whose graphs repeat nothing."""
    assert trace.graphs is not None
    unequal = [node for partition in trace.graphs.partitions for node in partition.unequal]
    if unequal:
        first = unequal[0]
        yield NODES.finding(count=len(unequal), node=first.node, expected=first.forward, found=first.backward)
    case, marked = expect.case, [partition for partition in trace.graphs.partitions if partition.marked]
    asked = case.checkpointing.mode != "none"
    if expect.has_formulas:
        asked = any(map(case.checkpointing.wraps, range(case.model.shape.layers)))
    repeated = [min(partition.repeated, partition.repeated_in_passes) for partition in marked]
    if asked and not (repeated and all(repeated)):
        yield NOTHING_REPEATED.finding(expected="repeated nodes in every such graph", found="none")


def _unequal(expect: Expectations, trace: RankTrace) -> Iterator[Mismatch]:
    for record, first, where in (*_repeated_casts(expect, trace), *_recomputed_matmuls(trace)):
        again, rule = _properties(record), CAST if isinstance(record, CastRecord) else MATMUL
        operand = f"{record.role} in {record.phase}" if isinstance(record, CastRecord) else f"matmul {record.gemm}"
        for name, expected in _properties(first).items():
            bits = repr(expected), repr(again[name])  # NaN equals NaN, and other numbers are written to the last bit
            if bits[0] != bits[1]:
                place = record.step, record.index, trace.rank, record.fqn
                words = _short(name, expected), _short(name, again[name])
                other = f"other bits of {words[1]}" if words[0] == words[1] else words[1]
                values = (("property", name), ("where", where), ("first", bits[0]), ("again", bits[1]))
                yield Mismatch(*place, rule, words[0], other, operand, values)


def _short(name: str, value: object) -> str:
    """Return a property as people read it: scales to six digits, data without their digests."""
    if isinstance(value, tuple) and name != "sizes":
        return " x ".join(dict.fromkeys(_short(name, part) for part in value))
    if isinstance(value, ScaleSummary):
        return " to ".join(dict.fromkeys(f"{number:.6g}" for number in (value.minimum, value.maximum)))
    return "float8 data" if name == "data" else f"{value}"


def _repeated_casts(expect: Expectations, trace: RankTrace) -> Iterator[_Repetition]:
    casts = casts_by_key(trace)
    executed = {(key, str(_properties(cast))) for (key, _), cast in casts.items()}
    for (key, occurrence), cast in casts.items():
        first_key, first_occurrence = _first_execution(expect.case, key, occurrence)
        first = casts.get((first_key, first_occurrence))
        # of a module that is called several times in a step, a recomputed cast may repeat another call
        is_another_call = not expect.has_formulas and (first_key, str(_properties(cast))) in executed
        if first is not None and first is not cast and not is_another_call:
            evaluated = expect.case.train.evaluate and first_key.phase in ("evaluation", "gathered")
            where = " (in the evaluation)" if evaluated else ""
            yield cast, first, where


def _first_execution(case: Case, key: CastKey, occurrence: int) -> tuple[CastKey, int]:
    """What a cast repeats: a forward cast the one in evaluation, a recomputed cast the one in forward, and so on.

    A gathered weight repeats the one that was used first. With one scale for the tensor the backward pass casts input
    and weight again exactly as the forward did.
    """
    if key.phase == "gathered":
        return key, 0
    if key.phase == "forward" and case.train.evaluate:
        return key._replace(phase="evaluation"), occurrence
    operands: dict[Role, tuple[Operand, Operand]] = {"input": ("i", "i_gw"), "weight": ("w", "w_gi")}
    blocks = [case.float8.traits.block_of(operand) for operand in operands.get(key.role, ())]
    again = key.phase == "backward" and blocks == [TENSOR, TENSOR]
    return (key._replace(phase="forward") if again or key.phase == "recompute" else key), occurrence


def _recomputed_matmuls(trace: RankTrace) -> Iterator[_Repetition]:
    matmuls = matmuls_by_key(trace)
    for (key, occurrence), matmul in matmuls.items():
        first = matmuls.get((key._replace(gemm="forward"), occurrence))
        if key.gemm == "recompute" and first is not None:
            yield matmul, first, ""


def _properties(record: CastRecord | MatmulRecord) -> dict[str, object]:
    if isinstance(record, CastRecord):
        of_data = {"scale": record.scale, "data": record.data_digest}
        return {"elements": record.elements, "dtype": record.target_dtype, **of_data}
    return {
        "sizes": (record.m, record.k, record.n),
        "dtypes": (record.a_dtype, record.b_dtype),
        "scales": (record.a_scale, record.b_scale),
        "data": (record.a_digest, record.b_digest),
    }


def _not_recomputed(expect: Expectations, trace: RankTrace) -> Iterator[Mismatch]:
    """Checkpointed blocks that recompute nothing: there is nothing to compare then, which must not pass."""
    assert trace.operands is not None
    fqns = [fqn for fqn, times in expect.linears.recomputed.items() if times]
    yield from _not_as_asked(expect, trace, bool(fqns))
    again = {(cast.fqn, cast.phase) for cast in trace.operands.casts if cast.role == "weight"}
    for fqn in fqns:
        if (fqn, "gathered" if fqn in expect.linears.gathered else "recompute") not in again:
            yield Mismatch(1, 0, trace.rank, fqn, NOT_RECOMPUTED, "a recomputation", "none")
    count = sum(matmul.gemm == "recompute" for matmul in trace.operands.matmuls)
    fewest, most = (calls * len(trace.steps) for calls in expect.recomputed_calls)
    if not fewest <= count <= most:
        expected = f"{most}" if fewest == most else f"{fewest} to {most}"
        yield Mismatch(1, 0, trace.rank, "the model", NUMBER, expected, f"{count}")


def _not_as_asked(expect: Expectations, trace: RankTrace, recomputed: bool) -> Iterator[Mismatch]:
    """Checkpointing of a model that is not known, of which it is only known whether the case asks for any."""
    asked = expect.case.checkpointing.mode != "none"
    if not expect.has_formulas and expect.converted_fqns and asked != recomputed:
        rule, words = NOT_RECOMPUTED if asked else UNASKED, ("none", "a recomputation")
        yield Mismatch(1, 0, trace.rank, "the model", rule, words[asked], words[recomputed])


_lifetime = Rules("lifetime", Stage.SCALES, located=True)
STALE_CAST = _lifetime("cast", "a matmul reads a weight that was cast before its last update")
COPY = _lifetime("copy", "a weight is cast from a copy that is older than its last update")
SCALE = _lifetime("scale", "the scale of a weight is older than its last update")
MICROBATCH = _lifetime("microbatch", "a matmul reads a cast of another microbatch or step")
OTHER_SCALE = _lifetime("other-scale", "a cast uses the scale of another tensor")
GATHERED = _lifetime("gathered", "FSDP2 still holds the whole weight after the step", stage=Stage.MODEL)


def _has_no_memory(expect: Expectations, device: str) -> str:
    if not expect.case.float8.enabled:
        return "nothing is cast to float8"
    return "" if expect.case.compile == "none" else "casts in generated code have no separate memory"


@_lifetime.judged_by(
    blind="High-precision activations; weights that FSDP2 gathered, whose rows `scales` compares; grouped matmuls.",
    not_judged=_has_no_memory,
    records=("operands",),
)
def check_lifetime(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is what a matmul reads of this step, and of this microbatch: casts, scales, and copies of weights?"""
    return findings_by_rule(mismatch for trace in run.by_rank for mismatch in _mismatches(trace))


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
    """Return None for a value from an earlier step if no weight was updated since."""
    if aged.what == "other_scale":
        return OTHER_SCALE
    if aged.role != "weight":
        return MICROBATCH
    if updated.isdisjoint(range(aged.first_step, aged.step)):
        return None
    return {"data": STALE_CAST, "source": COPY, "scale": SCALE}[aged.what]


def _time(aged: Aged, step: int, microbatch: int, where: str) -> str:
    of_step = f"of the evaluation of step {step}" if where == "evaluation" else f"of step {step}"
    return of_step + (f", microbatch {microbatch}" if microbatch and aged.role != "weight" else "")
