"""The numbers that are kept of a run, and derived tolerances."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.measuring import (
    DRAWS,
    LOSS_MARGIN,
    PARITY_MARGIN,
    derived_parity_tolerance,
    derived_tolerance,
    measured,
)
from harness.expect.expectations import Expectations
from harness.expect.work import executed
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.promises import Limit
from harness.result import Measured, Sent
from harness.trace import Run
from harness.trace.counts import FlopsRecord
from harness.trace.graphs import GraphCast
from harness.trace.operands import CastRecord, OperandTrace
from tests.builders import (
    WQ,
    make_case,
    make_cast,
    make_distance,
    make_failure,
    make_fused,
    make_golden,
    make_graphs,
    make_matmul,
    make_run,
    make_saved,
    make_scale,
    make_sent,
    make_sketch,
    make_tolerance,
    make_trace,
    make_witnesses,
    run_of,
    saved_as,
    traffic_of,
    with_casts,
    with_rank,
    with_sketches,
    with_step,
)

CASE = make_case(recipe="tensorwise", dp_shard=2, steps=3)
CASTS = (make_cast(), make_cast(index=1, role="weight", amax=4.0))


def graph_cast(**changes: object) -> GraphCast:
    cast = make_cast()
    numbers = {name: getattr(cast, name) for name in GraphCast.__struct_fields__ if hasattr(cast, name)}
    return replace(GraphCast(**numbers, order=1, is_weight=False), **changes)


def operands(of_cast: Mapping[str, Any] = MappingProxyType({}), **of_matmul: Any) -> OperandTrace:
    casts = (replace(CASTS[0], **of_cast), *CASTS[1:])
    return OperandTrace(casts=casts, matmuls=(make_matmul(*CASTS, index=2, **of_matmul),))


def recorded() -> Run:
    """Two ranks that recorded one of everything."""
    return make_run(
        CASE,
        calls=7,
        operands=operands(),
        sketches=(make_sketch(WQ), make_sketch(WQ, kind="param")),
        graphs=make_graphs(casts=(graph_cast(),), calls=(make_fused(times=2), make_fused(times=3, step=2))),
        traffic=(make_sent(1), make_sent(2), make_sent(2, kind="all_reduce", op="sum", times=1)),
        saved_memory=(make_saved(1, 100), make_saved(2, 28)),
    )


def numbers(run: Run, **witnesses: object) -> Measured:
    measurement = measured(CASE, run, make_witnesses(CASE, **witnesses))
    assert measurement is not None
    return measurement


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


NEXT = make_scale(224.00001525878906)  # one bit above the scale of the cast


def test_equal_runs_have_equal_numbers_in_any_order_of_ranks() -> None:
    assert numbers(recorded()) == numbers(recorded())
    assert numbers(recorded()).digests.keys() == {"casts", "matmuls", "gradients", "parameters"}
    run = recorded()
    assert numbers(run_of(*reversed(run.traces))) == numbers(run)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"operands": operands({"data_digest": "datb"})}, "casts"),
        ({"operands": operands({"scale": NEXT})}, "casts"),
        ({"graphs": make_graphs(casts=(graph_cast(scale=NEXT),))}, "casts"),
        ({"graphs": make_graphs(casts=(graph_cast(saturated=1),))}, "casts"),
        ({"operands": operands(b_digest="x")}, "matmuls"),
        ({"sketches": (make_sketch(WQ, digest="x"), make_sketch(WQ, kind="param"))}, "gradients"),
        ({"sketches": (make_sketch(WQ), make_sketch(WQ, kind="param", digest="x"))}, "parameters"),
    ],
)
def test_one_bit_of_one_rank_changes_the_digest_of_its_kind(change: dict[str, Any], kind: str) -> None:
    other = with_rank(recorded(), 1, lambda trace: replace(trace, **change))
    assert changed(numbers(recorded()).digests, numbers(other).digests) == {kind}


def test_counts_are_of_all_ranks_and_steps() -> None:
    measurement = numbers(recorded())
    assert measurement.scaled_mm_calls == 2 * 3 * 7
    assert measurement.saved_bytes == 2 * 128
    assert measurement.fused == {"fused_all_gather_matmul in forward": 10}
    assert measurement.wire == {
        "all_gather in uint8 along dp_shard": Sent(calls=16, payload_bytes=16 * 512),
        "all_reduce (sum) in uint8 along dp_shard": Sent(calls=2, payload_bytes=2 * 512),
    }


def test_the_range_of_an_operand_is_over_all_of_its_casts() -> None:
    def louder(cast: CastRecord) -> CastRecord:
        loud = replace(cast, amax=8.0, scale=make_scale(56.0), saturated=512, flushed=256)
        return loud if cast.role == "input" else cast

    inputs, weights = numbers(with_casts(recorded(), louder, rank=1)).casts
    assert (inputs.fqn, inputs.role, inputs.step) == (WQ, "input", 1)
    assert (inputs.amax, inputs.scale_min, inputs.scale_max) == (8.0, 56.0, 224.0)
    assert (inputs.saturated, inputs.flushed) == (0.5, 0.25)
    assert (weights.role, weights.amax, weights.saturated) == ("weight", 4.0, 0.0)


def test_nan_is_the_worst_of_all() -> None:
    golden = make_golden(CASE)
    run = with_step(recorded(), 0, 2, loss=math.nan)
    assert math.isnan(numbers(run, golden=golden).loss_distance or 0.0)
    quiet = with_casts(recorded(), lambda cast: replace(cast, amax=math.nan), rank=1)
    assert all(math.isnan(cast.amax) for cast in numbers(quiet).casts)
    solo = make_run(CASE, sketches=(make_sketch(WQ, value=math.nan),))
    assert math.isnan(numbers(recorded(), solo=solo).parity or 0.0)


def test_what_was_compared_is_kept_with_its_distance() -> None:
    golden, tolerance = make_golden(CASE, [7.75, 7.75, 7.25]), make_tolerance(0.5, 0.5, 0.5)
    replay = make_run(CASE, module_distances=(make_distance(distance=0.25), make_distance(distance=9.0, problem="x")))
    run = with_sketches(recorded(), lambda sketch: replace(sketch, owner=False), rank=1)
    measurement = numbers(run, golden=golden, tolerance=tolerance, solo=run_of(run.traces[0]), replay=replay)
    assert (measurement.loss_distance, measurement.parity, measurement.module_replay) == (0.25, 0.0, 0.25)
    assert measurement.allowed_loss == (0.5, 0.5, 0.5)
    assert measurement.curves.keys() == {"case", "golden", "solo"}
    assert measurement.curves["golden"].losses == (7.75, 7.75, 7.25)


def test_gradients_that_only_round_do_not_count() -> None:
    small, large = make_sketch("bias", value=1e-20), make_sketch(WQ, value=1.0)
    off = (replace(small, sums=make_sketch("", value=2e-20).sums), large)
    run, solo = (run_of(replace(make_run(CASE).traces[0], sketches=kept)) for kept in (off, (small, large)))
    assert numbers(run, solo=solo).parity == 0.0


def test_what_was_not_recorded_or_compared_is_none() -> None:
    measurement = numbers(make_run(CASE), solo=make_run(CASE))
    absent = (measurement.loss_distance, measurement.parity, measurement.module_replay, measurement.saved_bytes)
    assert absent == (None,) * 4
    assert (measurement.digests, measurement.casts, measurement.wire, measurement.fused) == ({}, (), {}, {})
    assert measurement.curves.keys() == {"case", "solo"}
    assert measured(CASE, run_of(make_failure()), make_witnesses(CASE)) is None
    assert measured_of(CASE, flops=None).expected_flops == {}
    assert measured_of(CASE, traffic=None).expected_wire is None
    assert measured_of(CASE, saved_memory=None).expected_saved_bytes is None


def measured_of(case: Case, **changes: Any) -> Measured:
    """The numbers of a run that sends and saves what the formulas say."""
    expect, steps, traces = Expectations(case), range(1, case.train.steps + 1), []
    for rank in range(case.world_size):
        by_words = executed(case, rank=rank, saves_attention=False).items()
        terms: list[Any] = [(*words.split()[::2], done.calls, done.flops) for words, done in by_words]
        saved = (saved_as(step, expect.saved_bytes(step=step, rank=rank)) for step in steps)
        said = {
            "traffic": traffic_of(case, rank),
            "flops": tuple(
                FlopsRecord(step=step, part=part, precision=precision, calls=calls, flops=flops)
                for step in steps
                for part, precision, calls, flops in terms
            ),
            "saved_memory": tuple(saved) if expect.saves_exactly else None,
        }
        traces.append(make_trace(case, rank, **{**said, **changes}))
    measurement = measured(case, run_of(*traces), make_witnesses(case))
    assert measurement is not None
    return measurement


def test_a_run_as_the_formulas_say() -> None:
    measurement = measured_of(CASE)
    assert measurement.expected_wire == measurement.wire and len(measurement.wire) > 1
    assert measurement.expected_saved_bytes == measurement.saved_bytes and measurement.saved_bytes

    assert measurement.expected_flops == measurement.flops and measurement.flops.keys() >= {
        "matmuls in float8",
        "attention in float32",
    }


def test_attention_is_recomputed_where_the_kernel_of_a_cpu_computes_it() -> None:
    case = make_case(checkpointing="selective_op")
    on_cpu, on_gpu = (measured_of(case, device=device).expected_flops for device in ("cpu", "NVIDIA H100 80GB HBM3"))
    words = "attention in float32"
    assert on_cpu[words].calls / on_gpu[words].calls == 6 / 4  # 2 forwards, 2 of backward


def test_what_is_only_limited_is_left_out() -> None:
    measurement = measured_of(make_case(recipe="tensorwise", tp=2, compile="graph", tp_styles="float8"))
    assert measurement.expected_saved_bytes is None
    limited = "all_reduce (max) in float64 along tp"
    assert measurement.expected_wire is not None and measurement.limited_wire == (limited,)
    assert measurement.wire.keys() - measurement.expected_wire.keys() == {limited}


DERIVED = parse_case_id("tp2-tensorwise-dim.512-v4096-s4-b16")
LOSSES = (9.0, 8.0, 7.0, 6.0)

distances = st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=4)


def of_losses(losses: Sequence[float]) -> Run:
    return run_of(make_trace(losses=losses))


def draws(*away: Sequence[float]) -> list[Run]:
    return [of_losses([loss + distance for loss, distance in zip(LOSSES, draw, strict=True)]) for draw in away]


def test_the_first_steps_share_the_mean_distance_of_all_draws() -> None:
    away = [(0.01, -0.02, 0.03, 0.0), (-0.01, 0.02, -0.03, 0.0)]
    tolerance = derived_tolerance(DERIVED, of_losses(LOSSES), draws(*away))
    mean = math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 3)
    assert tolerance.per_step == pytest.approx([LOSS_MARGIN * mean] * 4)
    assert tolerance.derived and tolerance.key == "tiny_dim512-tensorwise-bfloat16"
    assert f"{DRAWS} BF16 runs" in tolerance.evidence


def test_one_draw_that_runs_away_is_left_out() -> None:
    away = [(0.0, 0.0, 0.0, 0.03), (0.0, 0.0, 0.0, -0.04), (0.0, 0.0, 0.0, 5.0)]
    per_step = derived_tolerance(DERIVED, of_losses(LOSSES), draws(*away)).per_step
    assert per_step == pytest.approx([0, 0, 0, LOSS_MARGIN * math.sqrt((0.03**2 + 0.04**2) / 2)], abs=1e-9)
    assert derived_tolerance(DERIVED, of_losses(LOSSES), draws(*away[:2], (0, 0, 0, math.nan))).per_step == per_step
    away = (0.1, 0.1, 0.1, math.nan)
    assert math.isnan(derived_tolerance(DERIVED, of_losses(LOSSES), draws(away, away)).per_step[-1])
    early = (math.nan, 0.1, 0.1, 0.1)
    assert all(map(math.isnan, derived_tolerance(DERIVED, of_losses(LOSSES), draws(early, early)).per_step))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_tolerance_for_every_step(steps: int) -> None:
    reference, noisy = (of_losses([loss + distance for loss in LOSSES[:steps]]) for distance in (0, 0.1))
    assert derived_tolerance(DERIVED, reference, [noisy] * 4).per_step == pytest.approx([LOSS_MARGIN * 0.1] * steps)


@given(st.lists(distances, min_size=DRAWS, max_size=DRAWS), st.floats(1.0, 10.0))
def test_tolerances_of_losses_never_shrink_and_grow_with_the_distances(away: list[list[float]], factor: float) -> None:
    per_step = derived_tolerance(DERIVED, of_losses(LOSSES), draws(*away)).per_step
    assert len(per_step) == 4 and list(per_step) == sorted(per_step)
    wider = draws(*[[factor * distance for distance in one] for one in away])
    assert derived_tolerance(DERIVED, of_losses(LOSSES), wider).per_step == pytest.approx(
        [factor * allowed for allowed in per_step], rel=1e-6, abs=1e-9
    )


def gradients(*values: float) -> Run:
    sketches = tuple(make_sketch("w", step, value=value) for step, value in enumerate(values, start=1))
    return run_of(make_trace(sketches=sketches))


def test_the_largest_distance_of_a_gradient_counts_up_to_every_step() -> None:
    reference = gradients(1.0, 1.0, 1.0, 1.0)
    noisy = [gradients(1.1, 1.0, 1.3, 1.0), gradients(1.0, 0.8, 1.0, 1.0), gradients(9.0, 9.0, 9.0, 9.0)]
    tolerance = derived_parity_tolerance(DERIVED, reference, noisy)
    assert tolerance.per_step == pytest.approx(
        [PARITY_MARGIN * distance for distance in (0.1, 0.2, 0.3, 0.3)], rel=1e-5
    )


def test_gradients_as_far_apart_as_they_are_large_have_parted() -> None:
    reference, noisy = gradients(1.0, 1.0, 1.0, 1.0), gradients(1.1, 1.5, 1.0, 1.0)
    per_step = derived_parity_tolerance(DERIVED, reference, [noisy] * 4).per_step
    assert per_step == pytest.approx([0.3, *[Limit("derived.parted")] * 3], rel=1e-5)


def test_equal_gradients_added_in_another_order_are_as_far_apart_as_that_rounds() -> None:
    of = parse_case_id("target.mine-fsdp2-tensorwise-v2048-s3-b16")
    reference, noisy = gradients(1.0, 1.0, 1.0), gradients(1.1, 1.2, 1.1)
    per_step = derived_parity_tolerance(of, reference, [noisy] * 4).per_step
    assert per_step == pytest.approx([Limit("derived.added"), 0.6, 0.6], rel=1e-5)


def test_logprobs_are_compared_where_a_rank_has_the_position_and_nan_is_no_small_distance() -> None:
    def of(*values: float) -> dict[int, bytes]:
        return {3: struct.pack(f"{len(values)}d", *values)}

    def distances(*values: float) -> tuple[float, float] | None:
        case = make_case(steps=1)
        run, solo = (run_of(replace(make_trace(case), logprobs=of(*each))) for each in (values, (-7.0, -8.0, -9.0)))
        found = measured(case, run, make_witnesses(case, solo=solo))
        return None if found is None else found.logprobs

    assert distances(-7.0, math.inf, -9.5) == (0.5, 0.25)
    worst, mean = distances(-7.0, math.inf, math.nan) or (0, 0)
    assert not worst < 1e9 and not mean < 1e9
    assert distances(math.inf, math.inf, math.inf) is None
