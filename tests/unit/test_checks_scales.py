"""Scales of casts, and the values that casts lose."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks import scales
from harness.checks.check import Rule
from harness.expect.expectations import Expectations
from harness.expect.model import CastForm, CastSite
from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns
from harness.matrix.recipes import E4M3, FLOAT8_MAX
from harness.trace import Run
from harness.trace.operands import GEMM_OPERANDS, CastRecord, GemmRole, MatmulRecord, OperandTrace
from harness.verdict import Finding
from tests.builders import (
    make_case,
    make_cast,
    make_matmul,
    make_scale,
    make_trace,
    make_witnesses,
    not_judged,
    rules,
    run_of,
    with_casts,
)

AMAX = 2.0
STEPS = 2
Change = dict[str, Any]
ChangeOf = Callable[[CastRecord], Change]
Where = Callable[[CastRecord], bool]


def case(recipe: str = "tensorwise", **axes: object) -> Case:
    return make_case(recipe=recipe, steps=STEPS, **axes)


def cast(of: Case, site: CastSite, form: CastForm, *, index: int, step: int, rank: int) -> CastRecord:
    """A cast as every rank makes it: pieces of weights differ between TP ranks, activations between all ranks."""
    dims = 2 if site.role == "weight" or site.phase == "backward" else 3
    shape = (1, 16, 32)[-dims:]
    rows: tuple[int, ...] = ()
    if form.axiswise_dim is not None:
        rows = tuple(1 if axis == form.axiswise_dim % dims else size for axis, size in enumerate(shape))
    value = 128.0 if of.float8.traits.power_of_two_scales else FLOAT8_MAX[form.target_dtype] / AMAX
    gathers = site.phase in ("all_gather", "gathered")
    owner = rank % of.layout.tp if site.role == "weight" and not gathers else rank
    placed = [("dp_shard", "Shard(0)")] * gathers + [("tp", f"Shard({dims - 1})")] * (of.layout.tp > 1)
    return make_cast(
        amax=AMAX,
        scale=make_scale(value, rows),
        index=index,
        step=step,
        fqn=site.fqn,
        role=site.role,
        phase=site.phase,
        shape=shape,
        local_shape=shape,
        placements=tuple(placement for _, placement in placed),
        mesh_axes=tuple(axis for axis, _ in placed),
        source_dtype=form.source_dtype,
        target_dtype=form.target_dtype,
        axiswise_dim=form.axiswise_dim,
        data_digest=f"{site.fqn} {site.role} {step} {owner}",
    )


def matmul(of: Case, fqn: str, gemm: GemmRole, casts: dict[tuple[str, str], CastRecord], *, index: int) -> MatmulRecord:
    """A matmul of the last casts of its operands; some take the scale of their parent's input."""
    a, b = (casts.get((fqn, role)) or casts[fqn.rpartition(".")[0], role] for role in GEMM_OPERANDS[gemm])
    record = make_matmul(a, b, gemm, fqn=fqn, index=index)
    if gemm in ("dgrad", "wgrad") and of.float8.traits.scales_rows(gemm):
        return replace(record, a_scale=make_scale(1.0), b_scale=make_scale(1.0))
    return record


@functools.cache
def operands(of: Case, rank: int) -> OperandTrace:
    """What the probe records on a clean run, sites in any order, every matmul right after its operands."""
    casts: list[CastRecord] = []
    matmuls: list[MatmulRecord] = []
    for step in range(1, STEPS + 1):
        for site, forms in Expectations(of).casts.items():
            for form in forms:
                index = len(casts) + len(matmuls)
                casts.append(cast(of, site, form, index=index, step=step, rank=rank))
        last = {(record.fqn, record.role): record for record in casts}
        gemms: list[GemmRole] = ["forward", "dgrad", *(["wgrad"] if of.float8.traits.multiplies("wgrad") else [])]
        for fqn in converted_fqns(of):
            for gemm in gemms:
                matmuls.append(matmul(of, fqn, gemm, last, index=len(casts) + len(matmuls)))
    return OperandTrace(casts=tuple(casts), matmuls=tuple(matmuls))


def clean(of: Case) -> Run:
    return run_of(*(make_trace(of, rank, operands=operands(of, rank)) for rank in range(of.world_size)))


def changed(
    run: Run, change: Change | ChangeOf, *, rank: int | None = None, role: str = "", where: Where = lambda record: True
) -> Run:
    """The run with other fields of the casts of a role that `where` is true of, on one rank or on all."""

    def of(record: CastRecord) -> CastRecord:
        wanted = role in ("", record.role) and where(record)
        return replace(record, **(change(record) if callable(change) else change)) if wanted else record

    return with_casts(run, of, rank=rank)


def check(of: Case, run: Run) -> list[Finding]:
    return scales.check_scales(of, run, make_witnesses(of))


def rescaled(factor: float) -> ChangeOf:
    """Another scale, and what follows from it: as a wrong amax makes it."""

    def change(record: CastRecord) -> Change:
        value = record.scale.maximum * factor
        scaled = record.amax * value
        return {
            "scale": make_scale(value, record.scale.shape),
            "scaled_amax_minimum": scaled,
            "scaled_amax_maximum": scaled,
        }

    return change


def with_amax(times: float) -> ChangeOf:
    """So many times as large an amax, and the scale that is right for it."""
    return lambda one: {"amax": one.amax * times, "scale": make_scale(one.scale.maximum / times, one.scale.shape)}


CLEAN = [
    case(),
    case(output_layer=True),
    case(tp=2),
    case(tp=2, tp_styles="float8"),
    case(dp_shard=2),
    case(dp_shard=2, fp8_all_gather=True),
    case(dp_shard=2, fp8_all_gather=True, precompute_scale=True),
    case(dp_shard=2, tp=2, fp8_all_gather=True),
    case(dp_shard=2, dp_replicate=2, tp=2),
    case("rowwise"),
    case("rowwise", tp=2),
    case("rowwise_with_gw_hp", dp_shard=2),
    case(checkpointing="full"),
    case(checkpointing="selective_op"),
    case(dp_shard=2, fp8_all_gather=True, checkpointing="selective_layer"),
    case(dtype="bfloat16"),
    case("bf16", tp=2),
]


@pytest.mark.parametrize("of", CLEAN)
def test_a_clean_run_has_no_findings(of: Case) -> None:
    run = clean(of)
    if of.layout.dp > 1 and of.float8.enabled:  # activations of dp ranks have scales of their own
        for rank in range(of.world_size):
            larger = with_amax(2.0 ** (rank // of.layout.tp))
            run = changed(run, larger, rank=rank, where=lambda record: record.role != "weight")
    assert rules(check(of, run)) <= {scales.MATMUL_SCALE.name}


def test_a_wrong_scale_names_its_first_place_and_whose_amax_it_implies() -> None:
    in_w2 = changed(
        clean(case()), rescaled(1 + 2.0**-20), role="weight", where=lambda one: one.step == 2 and "w2" in one.fqn
    )
    (finding,) = [one for one in check(case(), in_w2) if one.rule == scales.RULES.amax.name]
    assert (finding.step, finding.rank, finding.module) == (2, 0, "layers.0.feed_forward.w2")
    assert "224.0 = 448 / amax 2.0" in (finding.expected or "")
    of = case(tp=2)
    local = changed(clean(of), {"amax": AMAX / 2}, rank=0, role="input")
    both = changed(local, rescaled(2.0), role="input")
    finding = next(one for one in check(of, both) if one.rule == scales.RULES.amax.name)
    assert (finding.rank, finding.notes) == (0, ("it is the scale for the amax on rank 0 alone, not reduced over tp",))
    assert finding.found == "448.0 = 448 / amax 1"
    alone = changed(local, rescaled(2.0), rank=0, role="input")
    unequal = next(one for one in check(of, alone) if one.rule == scales.DIFFERENT.name)
    assert (unequal.rank, unequal.notes) == (1, ())  # that of rank 1 is right


@pytest.mark.parametrize(
    ("lowest", "highest", "said"), [(200.0, 400.0, "block 1 of row 17"), (300.0, 500.0, "block 3 of row 2")]
)
def test_the_block_whose_scale_is_furthest_off_is_named(lowest: float, highest: float, said: str) -> None:
    of = case("mxfp8", dtype="bfloat16")
    wrong = {"scaled_amax_minimum": lowest, "scaled_amax_maximum": highest, "extreme_blocks": (17 * 4 + 1, 2 * 4 + 3)}
    run = changed(
        clean(of),
        lambda record: {**wrong, "scale": replace(record.scale, shape=(32, 4))},
        where=lambda record: record.role == "weight" and record.axiswise_dim == -1,
    )
    finding = next(one for one in check(of, run) if one.rule == scales.RULES.amax.name)
    assert finding.notes == (f"furthest off is {said}",)


def test_a_stale_scale_of_rows_names_its_step() -> None:
    of = case("rowwise")

    def fresh(record: CastRecord) -> Change:
        scale = make_scale(128.0, record.scale.shape, minimum=64.0, digest=f"{record.step}", power_of_two=True)
        return {"scale": scale, "scaled_amax_minimum": 300.0, "scaled_amax_maximum": 400.0}

    def stale(record: CastRecord) -> Change:
        return {"scale": replace(record.scale, digest="1"), "scaled_amax_maximum": 900.0}

    run = changed(clean(of), fresh)
    wrong = changed(run, stale, where=lambda record: (record.step, record.role) == (2, "weight"))
    finding = next(one for one in check(of, wrong) if one.rule == scales.RULES.amax.name)
    assert (finding.step, finding.notes) == (2, ("it is the scale of step 1",))
    assert "for amaxes of 0.249 to 1.49 times the right ones" in (finding.found or "")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"mismatched": 1}, scales.RULES.data),
        ({"saturated": 3}, scales.RULES.saturated),
        ({"nonfinite": 1}, scales.RULES.nonfinite),
        ({"target_dtype": E4M3}, scales.RULES.target_dtype),
        ({"source_dtype": "bfloat16"}, scales.SOURCE_DTYPE),
        ({"axiswise_dim": -1}, scales.DIM),
        ({"scale": make_scale(28672.0, dtype="float64")}, scales.RULES.scale_dtype),
        ({"scale": make_scale(28672.0, (16, 1))}, scales.RULES.scale_shape),
        ({"scale": make_scale(float("inf"))}, scales.RULES.scale_range),
        ({"scale": make_scale(-1.0)}, scales.RULES.scale_range),
        ({"scale": make_scale(float("nan"))}, scales.RULES.scale_range),
        ({"scale": make_scale(57344 / 2 * 0.999999)}, scales.RULES.amax),
    ],
)
def test_one_wrong_cast_is_found(change: Change, rule: Rule) -> None:
    run = clean(case())
    assert run.traces[0].operands is not None
    first = next(record.index for record in run.traces[0].operands.casts if record.role == "grad_output")
    wrong = changed(run, change, where=lambda record: record.index == first)
    assert rule.name in rules(check(case(), wrong))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_scale_of_nan_is_nan_and_no_rule_about_scales_is_broken(recipe: str) -> None:
    of = case(recipe)

    def change(record: CastRecord) -> Change:
        numbers = dict.fromkeys(("amax", "scaled_amax_minimum", "scaled_amax_maximum"), math.nan)
        return {**numbers, "scale": make_scale(math.nan, record.scale.shape, digest="nan"), "nonfinite": 1}

    run = changed(clean(of), change)
    (trace,) = run.traces
    assert trace.operands is not None
    nan = make_scale(math.nan)
    gradients = ("dgrad", "wgrad") if of.float8.traits.scales_rows("dgrad") else ()
    matmuls = tuple(
        one if one.gemm in gradients else replace(one, a_scale=nan, b_scale=nan) for one in trace.operands.matmuls
    )
    findings = check(of, run_of(replace(trace, operands=OperandTrace(casts=trace.operands.casts, matmuls=matmuls))))
    assert [one.rule for one in findings] == [scales.RULES.nonfinite.name]


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_makes_the_scale_of_both_nan(rank: int) -> None:
    of = case(tp=2)
    run = changed(clean(of), {"amax": math.nan}, rank=rank)
    assert scales.RULES.amax.name in rules(check(of, run))


def test_scales_of_rows_must_be_powers_of_two_that_fit() -> None:
    of = case("rowwise")
    for factor, rule in ((1.5, scales.RULES.power_of_two), (2.0, scales.RULES.amax), (0.25, scales.RULES.amax)):
        wrong = changed(clean(of), rescaled(factor), role="weight")
        assert rule.name in rules(check(of, wrong))


@pytest.mark.parametrize(
    ("of", "role", "change", "rule"),
    [
        (case(tp=2), "input", rescaled(0.5), scales.DIFFERENT),
        (case(tp=2), "weight", rescaled(0.5), scales.DIFFERENT),
        (case(dp_shard=2), "weight", rescaled(0.5), scales.DIFFERENT),
        (case(dp_shard=2, fp8_all_gather=True), "weight", rescaled(0.5), scales.DIFFERENT),
        (case(dp_shard=2, dp_replicate=2, fp8_all_gather=True), "weight", rescaled(0.5), scales.DIFFERENT),
        (case(dp_shard=2), "weight", {"data_digest": "x"}, scales.REPLICAS),
        (case(dp_shard=2), "weight", with_amax(2.0), scales.REPLICAS),
    ],
)
def test_ranks_that_hold_one_tensor_must_share_its_scale_and_data(
    of: Case, role: str, change: Change | ChangeOf, rule: Rule
) -> None:
    wrong = rules(check(of, changed(clean(of), change, rank=1, role=role)))
    assert rule.name in wrong and (rule is scales.DIFFERENT or scales.DIFFERENT.name not in wrong)


def test_the_largest_magnitude_may_be_on_another_rank() -> None:
    smaller = {"amax": AMAX / 4, "scaled_amax_maximum": 56.0, "scaled_amax_minimum": 56.0}
    run = changed(clean(case(tp=2)), smaller, rank=1, role="weight")
    assert check(case(tp=2), run) == []
    run = changed(run, smaller, rank=0, role="weight")
    assert scales.RULES.amax.name in rules(check(case(tp=2), run))


@pytest.mark.parametrize("precompute_scale", [False, True])
def test_a_gathered_weight_has_one_scale_on_all_tp_ranks(precompute_scale: bool) -> None:
    of = case(dp_shard=2, tp=2, fp8_all_gather=True, precompute_scale=precompute_scale)
    per_rank, right = rescaled(0.5), clean(of)
    own = changed(right, lambda record: {**per_rank(record), "amax": 2 * AMAX}, role="weight")
    mixed = run_of(*((right if rank % 2 else own).traces[rank] for rank in range(of.world_size)))
    (finding,) = [finding for finding in check(of, mixed) if finding.rule == scales.DIFFERENT.name]
    assert finding.step == 1


def test_data_parallel_ranks_do_not_share_all_scales() -> None:
    run = clean(case(dp_shard=2))
    assert scales.SHARED.name in rules(check(case(dp_shard=2), run))
    one_differs = changed(run, rescaled(0.5), rank=1, role="input", where=lambda record: record.index == 0)
    assert scales.SHARED.name not in rules(check(case(dp_shard=2), one_differs))


def test_local_missing_and_extra_casts_are_found() -> None:
    wrong = changed(clean(case(tp=2)), {"mesh_axes": (), "placements": ()}, role="input")
    assert scales.LOCAL.name in rules(check(case(tp=2), wrong))
    mine = operands(case(), 0)
    for casts in (mine.casts[:-1], (*mine.casts, mine.casts[-1]), ()):
        findings = check(case(), run_of(make_trace(case(), operands=OperandTrace(casts=casts, matmuls=()))))
        assert scales.RULES.number.name in rules(findings)
    findings = check(case("bf16"), run_of(make_trace(case("bf16"), operands=mine)))
    assert scales.RULES.number.name in rules(findings)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"a_scale": make_scale(1.0)}, scales.MATMUL_SCALE),
        ({"b_scale": make_scale(1.0)}, scales.MATMUL_SCALE),
        ({"a_digest": "x"}, scales.MATMUL_DATA),
        ({"b_digest": "x"}, scales.MATMUL_DATA),
        ({"fqn": "?"}, scales.NO_CAST),
    ],
)
def test_matmuls_use_what_was_cast(change: Change, rule: Rule) -> None:
    mine = operands(case(), 0)
    wrong = tuple(replace(one, **change) if one.gemm == "forward" else one for one in mine.matmuls)
    findings = check(case(), run_of(make_trace(case(), operands=replace(mine, matmuls=wrong))))
    assert rule.name in rules(findings)


def test_tensors_of_zeros_are_exempt_by_their_eps() -> None:
    zeros = {"amax": 0.0, "scaled_amax_minimum": 0.0, "scaled_amax_maximum": 0.0}
    of = case("rowwise")
    run = changed(clean(of), zeros, role="weight")
    assert check(of, run) == []
    run = changed(clean(case()), {**zeros, "scale": make_scale(448e12)}, role="weight")
    assert scales.RULES.amax.name not in rules(check(case(), run))


SHARP = make_case(tp=2, recipe="tensorwise", dtype="float64", steps=2)
ROUND = make_case(tp=2, recipe="tensorwise", dtype="bfloat16", steps=2)


def casts(*, flushed: int = 8, saturated: int = 0, elements: int = 1000, **changes: Any) -> tuple[CastRecord, ...]:
    """The cast of an input in two steps."""
    return tuple(
        make_cast(index=step, step=step, flushed=flushed, saturated=saturated, elements=elements, **changes)
        for step in (1, 2)
    )


def of_ranks(*ranks: tuple[CastRecord, ...]) -> Run:
    operands = (OperandTrace(casts=recorded, matmuls=()) for recorded in ranks)
    return run_of(*(make_trace(SHARP, rank, operands=operand_trace) for rank, operand_trace in enumerate(operands)))


SOLO = scales.with_cast_shares(of_ranks(casts()))


def underflow(run: Run, case: Case = SHARP, solo: Run | None = SOLO) -> list[Finding]:
    return scales.check_underflow(case, run, make_witnesses(case, solo=solo))


def test_shards_lose_together_what_one_rank_loses() -> None:
    assert underflow(of_ranks(casts(flushed=3, elements=500), casts(flushed=5, elements=500))) == []
    assert underflow(of_ranks(casts(), casts())) == [], "replicas lose the same share each"
    recomputed = (*casts(), *casts(phase="recompute"))
    assert underflow(of_ranks(recomputed)) == [], "what is cast again loses the same share"


@pytest.mark.parametrize(("case", "beyond", "is_found"), [(ROUND, 0, True), (ROUND, 1, False), (SHARP, 1, True)])
def test_a_limit_of_rounding_holds_for_the_steps_that_it_was_measured_over(
    case: Case, beyond: int, is_found: bool
) -> None:
    long = replace(case, train=replace(case.train, steps=scales.MEASURED_STEPS + 1))
    step, steps = scales.MEASURED_STEPS + beyond, range(1, scales.MEASURED_STEPS + 2)
    alike = tuple(make_cast(index=number, step=number, flushed=8, elements=1000) for number in steps)
    lost = tuple(replace(cast, flushed=100) if cast.step == step else cast for cast in alike)
    assert bool(underflow(of_ranks(lost), long, scales.with_cast_shares(of_ranks(alike)))) is is_found


def test_the_shares_of_a_solo_witness_take_the_place_of_its_operands() -> None:
    (trace,) = SOLO.traces
    assert trace.operands is None and trace.cast_shares is not None
    assert [(share.step, share.elements, share.flushed) for share in trace.cast_shares] == [(1, 1000, 8), (2, 1000, 8)]
    assert scales.cast_shares(run_of(make_trace(SHARP)).traces) == ()


@pytest.mark.parametrize(("name", "rule"), [("flushed", scales.FLUSHED), ("saturated", scales.SATURATED)])
def test_another_share_is_a_finding_that_names_operand_step_and_both_shares(name: str, rule: Any) -> None:
    first, second = casts()
    (finding,) = underflow(of_ranks((first, replace(second, **{name: getattr(second, name) + 2}))))
    assert (finding.rule, finding.step, finding.module, finding.operand) == (rule.name, 2, first.fqn, "input")
    assert finding.values["distance"] == pytest.approx(0.002) and finding.values["allowed"] == scales.EXACT
    assert (finding.values["count"], finding.values["compared"]) == (1, 2)


def test_rounding_moves_values_over_the_edge_of_a_flush_only_where_there_is_any() -> None:
    slightly, more = (of_ranks(casts(flushed=8 + int(scales.ROUNDED * 1000) + extra)) for extra in (0, 2))
    assert [finding.rule for finding in underflow(slightly)] == [scales.FLUSHED.name]
    assert underflow(slightly, ROUND) == []
    assert [finding.rule for finding in underflow(more, ROUND)] == [scales.FLUSHED.name]
    hsdp = make_case(dp_replicate=2, dp_shard=2, recipe="tensorwise", dtype="bfloat16")
    assert [finding.rule for finding in underflow(slightly, hsdp)] == [scales.FLUSHED.name]


def test_it_says_what_it_lacks_and_bf16_casts_nothing() -> None:
    run = of_ranks(casts(), casts())
    other = scales.with_cast_shares(of_ranks(casts(fqn="elsewhere")))
    for findings, rule in (
        (underflow(run, solo=None), scales.NO_REFERENCE),
        (underflow(run, solo=other), scales.NOTHING_COMPARED),
    ):
        assert [(finding.rule, finding.judged) for finding in findings] == [(rule.name, False)]
    assert "underflow" in not_judged(make_case(recipe="bf16")) and "underflow" not in not_judged(SHARP)
