"""The check `graph_scales` finds every cast inside of a graph whose scale is not the one it must have."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.casts import tensorwise_scale
from harness.checks.check import Rule
from harness.checks.graph_scales import (
    DIFFERENT,
    MATMUL_SCALE,
    NO_CAST,
    OTHER_CASTS,
    RULES,
    UNASKED,
    check_graph_scales,
)
from harness.checks.graph_scales import UNKNOWN as UNKNOWN_CAST
from harness.expect.model import CompiledCasts
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import RankTrace
from harness.trace.graphs import GraphCast, GraphMatmul, GraphTrace, UnknownCast
from harness.trace.operands import ScaleSummary
from harness.verdict import Finding
from tests.builders import make_cast, make_scale, make_trace, make_witnesses, rules, run_of

TENSORWISE = parse_case_id("tp2-tensorwise-graph-v2048-s2-b16")
ROWWISE = parse_case_id("tp2-rowwise-graph-v2048-s2-b16")
AMAX = (0.5, 2.0)  # of the two ranks


def cast(rank: int, step: int, summary: ScaleSummary) -> GraphCast:
    """A cast as the graph executes it, with the numbers that the same cast has outside of a graph."""
    eager = make_cast(amax=AMAX[rank], scale=summary, fqn="feed_forward.w1", step=step)
    numbers = {name: getattr(eager, name) for name in GraphCast.__struct_fields__ if hasattr(eager, name)}
    return GraphCast(**{**numbers, "order": 1, "phase": "forward", "is_weight": True})


def shared(rank: int, step: int) -> GraphCast:
    """Both ranks use the scale of the larger magnitude, as they must."""
    return cast(rank, step, make_scale(tensorwise_scale("float8_e4m3fn", max(AMAX))))


def own_rows(rank: int, step: int) -> GraphCast:
    """Every rank scales its own rows by powers of two."""
    return cast(rank, step, make_scale(2.0 ** math.floor(math.log2(448 / AMAX[rank])), (16, 1)))


def of_gradient(weight: GraphCast) -> GraphCast:
    """The cast of the gradient that belongs to the cast of a weight: tensorwise, in e5m2."""
    scale = make_scale(tensorwise_scale("float8_e5m2", 2.0))
    changes = {"phase": "backward", "is_weight": False, "target_dtype": "float8_e5m2", "scale": scale, "amax": 2.0}
    return replace(weight, order=9, **changes)


def trace(case: Case, rank: int, casts: list[GraphCast], *unknown: UnknownCast) -> RankTrace:
    """What a rank records: these casts of weights, and those of the gradients that belong to them."""
    steps = {weight_cast.step for weight_cast in casts} if case.float8.recipe == "tensorwise" else ()
    gradients = [of_gradient(shared(rank, step)) for step in steps]
    recorded = (*casts, *gradients)
    return make_trace(
        case, rank, graphs=GraphTrace(graphs=(), calls=(), casts=recorded, unknown_casts=unknown, workarounds=())
    )


def check(case: Case, casts: list[list[GraphCast]], *unknown: UnknownCast) -> list[Finding]:
    run = run_of(*(trace(case, rank, mine, *unknown) for rank, mine in enumerate(casts)))
    expected = CompiledCasts(1, 0, int(case.float8.traits.grad_output_dtype == "float8_e5m2"))
    return check_graph_scales(case, run, make_witnesses(case, compiled_casts=expected))


def with_one(make: Any, **changes: Any) -> list[list[GraphCast]]:
    """A correct run, but for the cast of rank 1 in step 2."""
    casts = [[make(rank, step) for step in (1, 2)] for rank in range(2)]
    casts[1][1] = replace(casts[1][1], **changes)
    return casts


def test_correct_casts_have_no_finding() -> None:
    assert check(TENSORWISE, with_one(shared)) == []
    assert check(ROWWISE, with_one(own_rows)) == []


def test_a_wrong_scale_says_whose_amax_it_implies() -> None:
    own = make_scale(tensorwise_scale("float8_e4m3fn", AMAX[0]))
    casts = [[replace(shared(rank, step), scale=own) for step in (1, 2)] for rank in range(2)]
    finding = next(one for one in check(TENSORWISE, casts) if one.rule == RULES.amax.name)
    assert finding.notes == ("it is the scale for the amax on rank 0 alone",)
    stale = make_scale(tensorwise_scale("float8_e4m3fn", 4.0))
    casts = [
        [replace(shared(rank, 1), amax=4.0, scale=stale), replace(shared(rank, 2), scale=stale)] for rank in (0, 1)
    ]
    finding = next(one for one in check(TENSORWISE, casts) if one.rule == RULES.amax.name)
    assert (finding.step, finding.notes) == (2, ("it is the scale for the amax of step 1",))


@pytest.mark.parametrize(("dtype", "named"), [("f32", True), ("b16", False)])
def test_a_scale_of_another_cast_names_it_unless_it_may_be_chance(dtype: str, named: bool) -> None:
    case = parse_case_id(f"tp2-tensorwise-graph-v2048-s2-{dtype}")
    other = replace(shared(0, 1), order=4, amax=8.0, scale=make_scale(tensorwise_scale("float8_e4m3fn", 8.0)))
    casts = [[replace(shared(rank, 1), scale=other.scale), other, shared(rank, 2)] for rank in (0, 1)]
    finding = next(one for one in check(case, casts) if one.rule == RULES.amax.name)
    assert (finding.notes == ("it is the scale for the amax of cast 4 in forward",)) is named


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_makes_the_scale_of_both_nan(rank: int) -> None:
    casts = [[shared(0, 1)], [shared(1, 1)]]
    casts[rank][0] = replace(casts[rank][0], amax=math.nan)
    casts = [[*mine, shared(rank, 2)] for rank, mine in enumerate(casts)]
    (finding,) = check(TENSORWISE, casts)
    assert finding.rule == RULES.amax.name and "amax nan" in (finding.expected or "")


PLACE: dict[str, Any] = {"step": 2, "order": 7, "phase": "forward", "fqn": "feed_forward.w1"}
UNKNOWN = UnknownCast(**PLACE, target_dtype="float8_e4m3fn", shape=(4, 4), missing="a clamp")


def test_what_is_cast_without_fp8_or_not_by_torchao_is_found() -> None:
    plain = parse_case_id("tp2-bf16-graph-v2048-s2-b16")
    assert check(plain, [[], []]) == []
    for findings, ranks in ((check(plain, [[], [shared(1, 1)]]), (1,)), (check(plain, [[], []], UNKNOWN), (0, 1))):
        assert (findings[0].rule, findings[0].ranks) == (UNASKED.name, ranks)
    (finding,) = check(TENSORWISE, with_one(shared), UNKNOWN)
    assert (finding.rule, finding.module, finding.step) == (UNKNOWN_CAST.name, "feed_forward.w1", 2)
    assert (finding.expected, finding.found) == ("a clamp", "conversion 7 in forward, [4, 4] to float8_e4m3fn")


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({"is_weight": False}, "weights in forward"),
        ({"target_dtype": "float8_e5m2"}, "tensors to float8_e5m2 in forward"),
        ({"target_dtype": "float8_e5m2", "phase": "backward"}, "tensors to float8_e5m2 in backward"),
    ],
)
def test_a_cast_to_another_dtype_or_of_another_tensor_is_counted(changes: dict[str, Any], tensors: str) -> None:
    findings = check(TENSORWISE, with_one(shared, **changes))
    counted = {miscount.values["of"]: miscount for miscount in findings if miscount.rule == RULES.number.name}
    finding = counted[f" of {tensors}"]
    assert (finding.step, finding.rank) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"saturated": 3}, RULES.saturated),
        ({"nonfinite": 1}, RULES.nonfinite),
        ({"mismatched": 1}, RULES.data),
        ({"target_dtype": "float8_e4m3fnuz"}, RULES.target_dtype),
    ],
)
def test_what_a_cast_did_wrong_is_found(changes: dict[str, Any], rule: Rule) -> None:
    findings = check(TENSORWISE, with_one(shared, **changes))
    (finding,) = [finding for finding in findings if finding.rule == rule.name]
    assert (finding.step, finding.rank, finding.module) == (2, 1, "feed_forward.w1")


@pytest.mark.parametrize(
    ("summary", "rule"),
    [
        (make_scale(224.0, dtype="bfloat16"), RULES.scale_dtype),
        (make_scale(224.0, minimum=math.nan, maximum=math.nan), RULES.scale_range),
        (make_scale(224.0, (32, 1)), RULES.scale_shape),
        (make_scale(224.0, (3, 16, 1)), RULES.scale_shape),
    ],
)
def test_a_malformed_scale_is_found(summary: ScaleSummary, rule: Rule) -> None:
    assert rule.name in rules(check(TENSORWISE, with_one(shared, scale=summary)))


def test_a_local_scale_and_a_stale_one_are_found_to_the_last_bit() -> None:
    own = make_scale(tensorwise_scale("float8_e4m3fn", AMAX[0]))
    casts = [[cast(rank, step, own if rank == 0 else shared(1, step).scale) for step in (1, 2)] for rank in range(2)]
    assert {DIFFERENT.name, RULES.amax.name} <= rules(check(TENSORWISE, casts))
    stale = make_scale(tensorwise_scale("float8_e4m3fn", math.nextafter(2.0, 3.0) * (1 + 1e-6)))
    casts = [[cast(rank, step, stale) for step in (1, 2)] for rank in range(2)]
    (finding,) = check(TENSORWISE, casts)
    assert finding.rule == RULES.amax.name


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_rows_scaled_by_another_power_are_found(factor: float) -> None:
    right = own_rows(1, 2).scale.maximum * factor
    casts = with_one(own_rows)
    casts[1][1] = cast(1, 2, make_scale(right, (16, 1)))
    assert RULES.amax.name in rules(check(ROWWISE, casts))


def test_other_casts_of_ranks_and_scales_that_are_no_powers_of_two_are_found() -> None:
    casts = with_one(own_rows, scale=make_scale(200.0, (16, 1)))
    assert RULES.power_of_two.name in rules(check(ROWWISE, casts))
    assert OTHER_CASTS.name in rules(check(TENSORWISE, with_one(shared, order=2)))
    casts = with_one(shared)
    casts[1].append(replace(casts[1][1], order=3, is_weight=False))
    (finding,) = check(TENSORWISE, casts)
    assert (finding.rank, finding.rule) == (1, OTHER_CASTS.name)
    casts = with_one(shared)
    casts[1].pop()
    finding, *_ = check(TENSORWISE, casts)
    assert (finding.rule, finding.values["where"]) == (NO_CAST.name, "rank 1")


def test_a_scale_that_generated_code_saved_for_backward_may_be_off_by_its_rounding() -> None:
    generated = parse_case_id("single-tensorwise-inductor-v2048-s1-b16")
    given = replace(shared(0, 1), order=2, phase="backward", is_weight=False, scale_is_given=True, saturated=1)
    made = replace(shared(0, 1), amax=max(AMAX))
    for factor, broken in ((1.01, set()), (1.02, {RULES.amax.name})):
        assert rules(check(generated, [[made, replace(given, amax=factor * max(AMAX))]])) == broken
    eager = parse_case_id("single-tensorwise-graph-v2048-s1-b16")
    assert rules(check(eager, [[made, given]])) >= {RULES.saturated.name, RULES.amax.name}


@pytest.mark.parametrize(
    ("compiled", "off", "broken"),
    [("inductor", 1.005, set()), ("inductor", 1.02, {RULES.amax.name}), ("graph", 1.005, {RULES.amax.name})],
)
def test_the_amax_that_generated_code_reduced_over_tp_may_be_off_by_its_rounding(
    compiled: str, off: float, broken: set[str]
) -> None:
    case = parse_case_id(f"tp2-tensorwise-{compiled}-v2048-s2-b16")
    assert rules(check(case, with_one(shared, amax=off * max(AMAX)))) == broken


@pytest.mark.parametrize(
    ("case_id", "phase", "scale", "is_found"),
    [
        ("single-tensorwise-inductor-v2048-s1-b16", "forward", 1.0, False),
        ("single-tensorwise-inductor-v2048-s1-b16", "forward", 1.005, True),
        ("single-tensorwise-inductor-v2048-s1-b16", "backward", 1.005, False),
        ("single-tensorwise-inductor-v2048-s1-b16", "backward", 1.05, True),
        ("single-tensorwise-graph-v2048-s1-b16", "backward", 1.005, True),
    ],
)
def test_a_matmul_with_the_scale_of_another_is_found(case_id: str, phase: Any, scale: float, is_found: bool) -> None:
    case, made = parse_case_id(case_id), replace(shared(0, 1), amax=max(AMAX))
    used: dict[str, Any] = {"a_scale": make_scale(scale / made.scale.maximum), "b_scale": make_scale(3.0)}
    matmul = GraphMatmul(**{**PLACE, "step": 1, "phase": phase}, **used, a_casts=(made.order,), b_casts=())
    assert check_matmul(case, made, matmul) == ({MATMUL_SCALE.name} if is_found else set())


def check_matmul(case: Case, made: GraphCast, matmul: GraphMatmul) -> set[str]:
    """The rules that a run of one rank breaks, which casts and multiplies so."""
    recorded = trace(case, 0, [made])
    assert recorded.graphs is not None
    run = run_of(replace(recorded, graphs=replace(recorded.graphs, matmuls=(matmul,))))
    expected = CompiledCasts(1, 0, int(case.float8.recipe == "tensorwise"))
    return rules(check_graph_scales(case, run, make_witnesses(case, compiled_casts=expected)))


MXFP8 = parse_case_id("single-mxfp8-graph-v2048-s1-b16")
ONES = make_scale(1.0, (16, 1), dtype="float8_e8m0fnu")


def of_blocks(**changes: Any) -> GraphCast:
    """A cast of 16 blocks to MXFP8, whose largest values are in the binade of 448."""
    made = replace(cast(0, 1, ONES), scaled_amax_minimum=225.0, scaled_amax_maximum=448.0)
    return replace(made, **changes)


def check_blocks(
    made: GraphCast, *, used: ScaleSummary = ONES, known: tuple[int, ...] = (1,), case: Case = MXFP8
) -> set[str]:
    matmul = GraphMatmul(
        step=1, order=1, phase="forward", fqn="w1", a_scale=used, b_scale=ONES, a_casts=(1,), b_casts=known
    )
    return check_matmul(case, made, matmul)


def test_blocks_have_scales_of_their_own_and_those_rounded_down_leave_values_below_512() -> None:
    assert check_blocks(of_blocks()) == set()
    assert check_blocks(of_blocks(scaled_amax_maximum=448.5)) == {RULES.amax.name}
    assert check_blocks(of_blocks(scaled_amax_minimum=224.0)) == {RULES.amax.name}
    assert check_blocks(of_blocks(scale=replace(ONES, shape=(16, 2)))) == {RULES.scale_shape.name}
    for shape, of_scale in [((2, 8, 32), (16, 1)), ((2, 8, 32), (2, 8, 1)), ((512,), (16,))]:
        assert check_blocks(of_blocks(shape=shape, scale=replace(ONES, shape=of_scale))) == set()
        assert check_blocks(of_blocks(shape=shape)) == (set() if len(shape) > 1 else {RULES.scale_shape.name})
    assert check_blocks(of_blocks(shape=())) == {RULES.scale_shape.name}
    assert check_blocks(of_blocks(scale=replace(ONES, dtype="float32"))) == {RULES.scale_dtype.name}
    assert check_blocks(of_blocks(), used=replace(ONES, digest="others")) == {MATMUL_SCALE.name}
    assert check_blocks(of_blocks(), known=()) == {MATMUL_SCALE.name}
    floor = parse_case_id("single-mxfp8_floor-graph-v2048-s1-b16")
    assert check_blocks(of_blocks(scaled_amax_minimum=256.0, scaled_amax_maximum=511.0), case=floor) == set()
    for changes in ({"scaled_amax_minimum": 255.0}, {"scaled_amax_minimum": 256.0, "scaled_amax_maximum": 512.0}):
        assert check_blocks(of_blocks(**changes), case=floor) == {RULES.amax.name}
