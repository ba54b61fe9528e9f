"""Scale rules inside of compiled graphs: those of `scales.py` that do not need the linear or the placements of a cast.

A compiler merges equal casts and drops the placements of their tensors. But all ranks of a TP group run the same graph,
so their casts at the same place belong to one tensor: a tensorwise scale must be the same on all TP ranks and match the
amax over them.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial

from harness.checks.assembly import largest, same_number
from harness.checks.casts import Broken, CastRules, Source, implied_source, inverse, of_steps, on_ranks
from harness.checks.check import Mismatch, Rule, Rules, Stage, Witnesses, findings_by_rule
from harness.expect.expectations import CASTS, Expectations
from harness.expect.model import CompiledCasts
from harness.expect.module_replay import rounding
from harness.matrix.case import Case
from harness.matrix.layout import peers
from harness.matrix.recipes import E5M2, FLOAT8_MAX
from harness.text import format_ranks
from harness.trace import Run
from harness.trace.graphs import GraphCast, GraphMatmul, UnknownCast
from harness.trace.operands import ScaleSummary
from harness.verdict import Finding

_rule = Rules(
    "graph_scales",
    Stage.SCALES,
    located=True,
    only={"a damaged trace": "scale-dtype scale-shape target-dtype other-casts unasked"},
)
RULES = CastRules(_rule)
NO_CAST = _rule("no-cast", "no cast to float8 was executed in some step on {where}")
UNASKED = _rule("unasked", "blocks cast to float8 although no linear is converted, on {ranks}")
UNKNOWN = _rule("unknown-cast", "a conversion to float8 is not torchao's cast")
OTHER_CASTS = _rule("other-casts", "TP ranks execute different casts")
DIFFERENT = _rule("different-per-rank", "TP ranks use different scales for the same tensor")
MATMUL_SCALE = _rule("matmul-scale", "matmul uses the wrong scale for its operand", stage=Stage.VALUES)

Casts = dict[int, dict[tuple[int, int], GraphCast]]  # of every rank, by step and order in it


def _partly(expect: Expectations, device: str) -> str:
    if expect.has_formulas or expect.case.compile == "none":
        return ""
    return "the number of casts: it is not known which linears are compiled"


@_rule.judged_by(
    blind="The linear of a cast; differences between generated code and its graph, which `graphs` compares.",
    partly=_partly,
    records=("graphs",),
    formula=CASTS,
    needs_linears=True,
)
def check_graph_scales(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is every tensor in a compiled graph cast to float8 with the correct scale?"""
    unknown = [(trace.rank, cast) for trace in run.traces if trace.graphs for cast in trace.graphs.unknown_casts]
    casts: Casts = {
        trace.rank: {(cast.step, cast.order): cast for cast in trace.graphs.casts if cast.step}
        for trace in run.by_rank
        if trace.graphs is not None
    }
    if not case.float8.enabled:
        ranks = {*(rank for rank, by_place in casts.items() if by_place), *(rank for rank, _ in unknown)}
        return [UNASKED.finding(ranks=ranks, expected="no cast to float8", found="casts")] if ranks else []
    steps = range(1, case.train.steps + 1)
    idle = [rank for rank, by_place in casts.items() if {step for step, _ in by_place} != set(steps)]
    if idle or not casts:
        where = format_ranks(idle) if idle else "any rank"
        return [NO_CAST.finding(ranks=idle, where=where, expected="casts in the graphs of every step")]
    single = ((rank, cast) for rank, by_place in casts.items() for cast in by_place.values())
    return findings_by_rule(
        [
            *(_unknown(rank, cast) for rank, cast in unknown),
            *(_mismatch(rank, cast, *broken) for rank, cast in single for broken in _cast_rules(case, cast)),
            *_counts(case, casts, witnesses.expect.compiled_casts),
            *_tp_groups(case, casts),
            *_matmuls(case, run, casts),
        ],
        partial(_source, case, casts),
    )


def _source(case: Case, casts: Casts, wrong: Mismatch) -> str:
    """What the scale of a tensor was made from instead of the right amax; empty for others, and where nothing fits."""
    if wrong.rule is not RULES.amax or not case.float8.traits.one_scale_per_tensor:
        return ""
    ranks, places = peers(case.layout, wrong.rank, ("tp",)), ((step, wrong.order) for step in range(1, wrong.step + 1))
    groups = (on_ranks(casts, ranks, place) for place in places)
    amaxes = [{rank: cast.amax for rank, cast in group.items()} for group in groups]
    group, cast = amaxes[-1], casts[wrong.rank][wrong.step, wrong.order]
    sources = (
        *(Source(f"the amax on rank {rank} alone", amax) for rank, amax in group.items()),
        *of_steps({step: largest(before.values()) for step, before in enumerate(amaxes[:-1], 1)}),
        *_other_casts(case, casts[wrong.rank].values(), cast),
    )
    return implied_source(cast.target_dtype, cast.scale.maximum, largest(group.values()), sources)


def _other_casts(case: Case, casts: Iterable[GraphCast], cast: GraphCast) -> Iterator[Source]:
    """Yield the amaxes of the other casts in the same step; in bfloat16 none, whose amaxes are equal by chance."""
    for other in casts:
        if other.step == cast.step and other.order != cast.order and case.train.dtype != "bfloat16":
            yield Source(f"the amax of cast {other.order} in {other.phase}", other.amax)


def _unknown(rank: int, cast: UnknownCast) -> Mismatch:
    operand = f"conversion {cast.order} in {cast.phase}, {list(cast.shape)}"
    found = f"{operand} to {cast.target_dtype}"
    return Mismatch(cast.step, cast.order, rank, cast.fqn, UNKNOWN, cast.missing, found, operand)


def _counts(case: Case, casts: Casts, expected: CompiledCasts | None) -> Iterator[Mismatch]:
    """Yield the casts of a step that no compiler may merge.

    Where dgrad has scales of its own for a weight, the partitioner may cast that weight for it in forward already.
    """
    if expected is None:
        return
    names = ("weights in forward", f"tensors to {E5M2} in forward", f"tensors to {E5M2} in backward")
    for rank, by_place in casts.items():
        for step in range(1, case.train.steps + 1):
            mine = [cast for cast in by_place.values() if cast.step == step]
            for name, wanted in zip(names, expected, strict=True):
                count = sum(_is_counted(cast, name) for cast in mine)
                early = name.startswith("weights") and not case.float8.traits.one_scale_per_tensor
                if count < wanted or (count > wanted and not early):
                    place, values = (step, 0, rank, "the blocks"), (("of", f" of {name}"),)
                    yield Mismatch(*place, RULES.number, str(wanted), str(count), values=values)


def _is_counted(cast: GraphCast, name: str) -> bool:
    is_operand = cast.is_weight if name.startswith("weights") else cast.target_dtype == E5M2
    return is_operand and name.endswith(cast.phase)


def _cast_rules(case: Case, cast: GraphCast) -> Iterator[Broken]:
    if cast.target_dtype not in FLOAT8_MAX:
        yield RULES.target_dtype, " or ".join(FLOAT8_MAX), cast.target_dtype
    *batch, columns = cast.shape or (1,)
    shapes = {
        tuple(side // size for side, size in zip(sides, own.block, strict=True))
        for own in filter(None, case.float8.traits.casts.values())
        for sides in ((math.prod(batch), columns), (columns, math.prod(batch)))
        if own.block[1]
    }
    *rows, blocks = cast.scale.shape or (1,)
    if shapes and (math.prod(rows), blocks) not in shapes:
        yield RULES.scale_shape, " or ".join(map(str, sorted(shapes))), str(cast.scale.shape)
    elif not shapes and not _scale_shape_fits(cast):
        yield RULES.scale_shape, f"one scale, or one per row of {list(cast.shape)}", str(cast.scale.shape)
    slack = _slack(case, cast)
    yield from (broken for broken in RULES.of_numbers(case, cast) if not (slack and broken[0] is RULES.saturated))


def _slack(case: Case, cast: GraphCast) -> float:
    """Return how far the amax may be from the one that the scale was made for, relative to it.

    Generated code saves the scale of a cast for backward, which computes the source again: by other operators fused to
    another kernel, so that the last bit may differ. The scale is checked where it is made. Under TP scales are made of
    an amax of all ranks: the code's, while the source is the graph's. A few elements saturate then.
    """
    in_another_kernel = cast.scale_is_given or case.layout.tp > 1
    return rounding(case) if case.compile == "inductor" and in_another_kernel else 0.0


def _scale_shape_fits(cast: GraphCast) -> bool:
    shape = cast.scale.shape
    if math.prod(shape) == 1 or len(shape) != len(cast.shape):
        return math.prod(shape) == 1
    return [own for own, size in zip(shape, cast.shape, strict=True) if own != size] == [1]


def _tp_groups(case: Case, casts: Casts) -> Iterator[Mismatch]:
    for rank in casts:
        ranks = peers(case.layout, rank, ("tp",))
        if rank != ranks[0]:
            continue
        for place in sorted({place for other in ranks for place in casts.get(other, {})}):
            group = on_ranks(casts, ranks, place)
            cast = group[min(group)]
            if len(group) != len(ranks):
                yield _mismatch(min(group), cast, OTHER_CASTS, f"{len(ranks)} ranks", f"{len(group)}")
            elif case.float8.traits.block:  # which no sharding divides
                yield from _each_alone(case, group)
            elif math.prod(cast.scale.shape) == 1:
                yield from _one_scale(case, rank, group)
            elif len(group) > 1 and len({part.scale.digest for part in group.values()}) == 1:  # shards of the same rows
                yield from _largest_scaled(case, rank, group)
            else:
                yield from _each_alone(case, group)


def _matmuls(case: Case, run: Run, casts: Casts) -> Iterator[Mismatch]:
    """Every operand of a matmul is given the inverse of the scale that it was cast with, where its cast is known."""
    of_rows = any(case.float8.traits.scales_rows(matmul) for matmul in ("dgrad", "wgrad"))
    for trace in run.by_rank:
        for matmul in trace.graphs.matmuls if trace.graphs is not None else ():
            sides = {"a": (matmul.a_scale, matmul.a_casts), "b": (matmul.b_scale, matmul.b_casts)}
            for side, (scale, orders) in sides.items():
                known = [casts[trace.rank][matmul.step, order] for order in orders if matmul.step]
                if case.float8.traits.block and matmul.step:  # the scales of blocks are the cast's, every one
                    expected = str(known[0].scale) if known else "the scales of a cast in this step"
                    fits = scale.digest in {cast.scale.digest for cast in known}
                else:
                    right = [inverse(cast.scale) for cast in known]
                    if of_rows and matmul.phase == "backward":
                        right.append((1.0, 1.0))  # they are multiplied without scales, and divided by them afterwards
                    expected = f"{right[0]}" if right else ""
                    fits = not known or any(_fits(case, matmul, scale, scale_range) for scale_range in right)
                if not fits:
                    operand = f"operand {side} of a matmul in {matmul.phase}"
                    place = matmul.step, matmul.order, trace.rank, matmul.fqn
                    yield Mismatch(*place, MATMUL_SCALE, expected, str(scale), operand)


def _fits(case: Case, matmul: GraphMatmul, scale: ScaleSummary, expected: tuple[float, float]) -> bool:
    """In backward, generated code multiplies with scales that it saved: those of the casts except their rounding."""
    saved = case.compile == "inductor" and matmul.phase == "backward"
    slack = rounding(case) if saved else 0.0
    pairs = zip((scale.minimum, scale.maximum), expected, strict=True)
    return all(same_number(given, right) or abs(given - right) <= slack * abs(right) for given, right in pairs)


def _one_scale(case: Case, rank: int, group: dict[int, GraphCast]) -> Iterator[Mismatch]:
    """One scale for a tensor: equal on the TP ranks that hold the tensor or its shards, and derived from its amax."""
    cast = group[rank]
    for other, theirs in group.items():
        if theirs.scale.digest != cast.scale.digest:
            expected, found = f"as on rank {rank}: {cast.scale.maximum!r}", f"{theirs.scale.maximum!r}"
            yield _mismatch(other, theirs, DIFFERENT, expected, found)
    if case.float8.traits.one_scale_per_tensor:
        amax, slack = largest(peer_cast.amax for peer_cast in group.values()), _slack(case, cast)
        off = abs(amax * cast.scale.maximum / FLOAT8_MAX.get(cast.target_dtype, math.nan) - 1)
        for broken in RULES.of_tensor(cast, amax) if not 0 < off <= slack else ():
            yield _mismatch(rank, cast, *broken)
    else:
        yield from _largest_scaled(case, rank, group)


def _largest_scaled(case: Case, rank: int, group: dict[int, GraphCast]) -> Iterator[Mismatch]:
    """Of a scale that ranks share only the largest amax can be checked."""
    highest = largest(cast.scaled_amax_maximum for cast in group.values())
    yield from _power_of_two(case, rank, group[rank], highest, highest)


def _each_alone(case: Case, group: dict[int, GraphCast]) -> Iterator[Mismatch]:
    for other, theirs in group.items():
        yield from _power_of_two(case, other, theirs, theirs.scaled_amax_minimum, theirs.scaled_amax_maximum)


def _power_of_two(case: Case, rank: int, cast: GraphCast, lowest: float, highest: float) -> Iterator[Mismatch]:
    slack, traits = _slack(case, cast), case.float8.traits
    for broken in RULES.of_powers(traits, cast.target_dtype, lowest * (1 + slack), highest * (1 - slack)):
        yield _mismatch(rank, cast, *broken)


def _mismatch(rank: int, cast: GraphCast, rule: Rule, expected: str, found: str) -> Mismatch:
    operand = f"cast {cast.order} in {cast.phase}, {list(cast.shape)}"
    return Mismatch(cast.step, cast.order, rank, cast.fqn, rule, expected, found, operand)
