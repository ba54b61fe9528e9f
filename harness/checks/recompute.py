"""Does everything that runs twice give the same result twice? Recomputed casts and matmuls, and operands used again.

When recomputation differs from forward, the gradients belong to a function that was never evaluated, while the loss is
correct. In compiled blocks backward graphs repeat nodes of forward graphs: they must be the same nodes.
"""

from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from harness.checks.check import Check, Witnesses
from harness.checks.findings import Mismatch, first_place, merge_ranks, traces_by_rank
from harness.checks.occurrences import CastKey, casts_by_key, matmuls_by_key
from harness.checks.rule import Rule, Rules, Stage
from harness.expect.expectations import MATMULS, Expectations
from harness.matrix.case import Case
from harness.matrix.recipes import Operand
from harness.registry import computes_on_plain_shards
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, MatmulRecord, Role
from harness.verdict import Finding

_rule = Rules("recompute", Stage.EXECUTION)
NODES = _rule("nodes", "{count:n node of backward graphs is|nodes of backward graphs are} not as in forward: {node}")
NOTHING_REPEATED = _rule(
    "nothing-repeated", "backward graphs of checkpointed blocks repeat nothing of forward", stage=Stage.MODEL
)
_DIFFERS = " differs from its first execution in its {property}"
CAST = _rule("cast", f"a cast{_DIFFERS}", located=True, key=("property",))
MATMUL = _rule("matmul", f"a matmul{_DIFFERS}", located=True, key=("property",))
NOT_RECOMPUTED = _rule("not-recomputed", "checkpointed forward was not recomputed", stage=Stage.MODEL, located=True)
UNASKED = _rule("unasked", "forward was recomputed without being asked for")
NUMBER = _rule("number", "wrong number of recomputed matmuls", formula=MATMULS)


class _Repetition(NamedTuple):
    """Two executions of the same cast or matmul, `second` at `order`, by the properties that must be equal."""

    order: int
    step: int
    fqn: str
    rule: Rule
    operand: str
    first: dict[str, object]
    second: dict[str, object]


def _not_judged(expect: Expectations, device: str) -> str:
    case = expect.case
    if computes_on_plain_shards(case.target) and case.layout.tp > 1 and case.compile != "none":
        return "in backward, a graph reads a plain tensor that was gathered through a copy"
    return ""


@partial(
    Check,
    declares=_rule,
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
    of_ranks = (
        [*_unequal(expect, trace), *_not_recomputed(expect.of(trace.rank), trace)] for trace in traces_by_rank(run)
    )
    firsts = (
        (min(mismatches, key=lambda mismatch: mismatch.place), len(mismatches)) for mismatches in of_ranks if mismatches
    )
    return [first.finding(f"{first_place(first)}; {{total}} in total", total=total) for first, total in firsts]


def _of_graphs(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """Nodes that backward graphs repeat and change, and checkpointed blocks whose graphs repeat nothing."""
    assert trace.graphs is not None
    unequal = [node for partition in trace.graphs.partitions for node in partition.unequal]
    if unequal:
        first = unequal[0]
        yield NODES.finding(count=len(unequal), node=first.node, expected=first.forward, found=first.backward)
    case = expect.case
    wrapped = [case.checkpointing.wraps(layer) for layer in range(case.model.shape.layers)]
    if not expect.has_formulas:
        wrapped = [case.checkpointing.mode != "none"]
    repeated = [
        min(partition.repeated, partition.repeated_in_passes)
        for partition in trace.graphs.partitions
        if partition.marked
    ]
    if any(wrapped) and not (repeated and all(repeated)):
        yield NOTHING_REPEATED.finding(expected="repeated nodes in every such graph", found="none")


def _unequal(expect: Expectations, trace: RankTrace) -> Iterator[Mismatch]:
    for repetition in (*_repeated_casts(expect, trace), *_recomputed_matmuls(trace)):
        for name, expected in repetition.first.items():
            found = f"{repetition.second[name]}"
            if found != f"{expected}":  # as texts: NaN equals NaN, and other numbers are written to the last bit
                place = repetition.step, repetition.order, trace.rank, repetition.fqn
                yield Mismatch(*place, repetition.rule, f"{expected}", found, repetition.operand, (("property", name),))


def _repeated_casts(expect: Expectations, trace: RankTrace) -> Iterator[_Repetition]:
    casts = casts_by_key(trace)
    executed = {(key, str(_cast_properties(cast))) for (key, _), cast in casts.items()}
    for (key, occurrence), cast in casts.items():
        first_key, first_occurrence = _first_execution(expect.case, key, occurrence)
        first = casts.get((first_key, first_occurrence))
        if first is not None and first is not cast and not _is_another_call(expect, first_key, cast, executed):
            properties = _cast_properties(first), _cast_properties(cast)
            yield _Repetition(cast.index, key.step, key.fqn, CAST, f"{cast.role} in {cast.phase}", *properties)


def _is_another_call(
    expect: Expectations, first: CastKey, cast: CastRecord, executed: Collection[tuple[CastKey, str]]
) -> bool:
    """True if a recomputed cast repeats another call of a module that is called several times in a step."""
    return not expect.has_formulas and (first, str(_cast_properties(cast))) in executed


def _first_execution(case: Case, key: CastKey, occurrence: int) -> tuple[CastKey, int]:
    """What a cast repeats: a forward cast the one in evaluation, a recomputed cast the one in forward, and so on.

    A gathered weight repeats the one that was used first.

    With one scale for the tensor the backward pass casts input and weight again exactly as the forward did.
    """
    if key.phase == "gathered":
        return key, 0
    if key.phase == "forward" and case.train.evaluate:
        return key._replace(phase="evaluation"), occurrence
    operands: dict[Role, tuple[Operand, Operand]] = {"input": ("i", "i_gw"), "weight": ("w", "w_gi")}
    scaling = [case.float8.traits.scaling[operand] for operand in operands.get(key.role, ())]
    again = key.phase == "backward" and scaling == ["ten", "ten"]
    return (key._replace(phase="forward") if again or key.phase == "recompute" else key), occurrence


def _cast_properties(cast: CastRecord) -> dict[str, object]:
    return {
        "elements": cast.elements,
        "dtype": cast.target_dtype,
        "scale": (cast.scale.minimum, cast.scale.maximum, cast.scale.digest),
        "data": cast.data_digest,
    }


def _recomputed_matmuls(trace: RankTrace) -> Iterator[_Repetition]:
    matmuls = matmuls_by_key(trace)
    for (key, occurrence), matmul in matmuls.items():
        first = matmuls.get((key._replace(gemm="forward"), occurrence))
        if key.gemm == "recompute" and first is not None:
            properties = _matmul_properties(first), _matmul_properties(matmul)
            yield _Repetition(matmul.index, key.step, key.fqn, MATMUL, f"matmul {matmul.gemm}", *properties)


def _matmul_properties(matmul: MatmulRecord) -> dict[str, object]:
    return {
        "sizes": (matmul.m, matmul.k, matmul.n),
        "dtypes": (matmul.a_dtype, matmul.b_dtype),
        "scales": (matmul.a_scale, matmul.b_scale),
        "data": (matmul.a_digest, matmul.b_digest),
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
        rule = NOT_RECOMPUTED if asked else UNASKED
        found = "a recomputation" if recomputed else "none"
        yield Mismatch(1, 0, trace.rank, "the model", rule, "a recomputation" if asked else "none", found)
