"""Clean runs of every kind on real ranks: with all probes at once no check has a finding, and no bit changes.

What planted faults do to the same records is told by the file of each probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from harness.checks.assembly import largest
from harness.checks.check import Witnesses
from harness.checks.divergence import first_divergence
from harness.checks.fp8_on import check_matmuls
from harness.checks.local_parity import check_local_parity
from harness.checks.measuring import measured
from harness.checks.memory import check_leaks, check_live_memory, check_memory
from harness.checks.parity import check_parity, worst_distances
from harness.checks.recompute import check_recompute
from harness.checks.scales import check_scales
from harness.checks.traffic import check_traffic
from harness.expect.model import scaled_mm_calls
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.matrix.numerics import replayed_steps
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_tolerance, make_witnesses, probes_for
from tests.worker.runs import numbers

# Distance from the solo witness where sums have the order of ranks, and in float64.
ORDERED, EXACT = 1e-8, 1e-12  # measured: below 4e-9 and 2e-15

CASES = [
    "tp2-nosp-tensorwise-ac.op-kvheads.4-v2048-gb4-s2-f32",
    "fsdp2-reshard.always-tensorwise-ag.fp8-head.fp8-bias-v2048-gb4-s3-b16",
    "fsdp3-tensorwise-v2050-gb6-s2-b16",
]
# Of these, the same without probes, too: TP, FSDP2 and blocks of MXFP8, checkpointed.
COMPARED = [
    "tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s2-f64",
    "fsdp2-tensorwise-ag.fp8pre-ac.layer2-v2048-gb4-s3-b16",
    "fsdp2-mxfp8-wrapper-ac.full-v2048-gb4-s2-accum2-b16",
]

# The same every night, of more kinds.
NIGHTLY = [
    "single-tensorwise-ac.op-v2048-gb4-s3-f64",
    "fsdp2-reshard.never-rowwise-ac.full-v2050-gb4-s3-f32",
    "single-tensorwise-v2048-gb4-s2-b16",
    "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s2-b16",
    "tp2-rowwise-casts.go_gw.dis+i.ten+i_gw.dis-v2048-gb4-s2-f64",
    "hsdp2x2-tensorwise-ag.fp8pre-head.fp8-v2048-s2-accum2-reduce.last-b16",
    "tp2-rowwise-filter.w1+wk-ac.op-bias-v2048-gb4-s2-b16",
    "tp4-nolp-tensorwise-v2050-gb4-s1-f64",
    "tp2-bf16-ac.full-v2050-vpad128-gb4-s2-b16",
    "tp2-rowwise-v2048-gb4-s3-resume.resharded-sgd-lr0.1-f64",
    "hsdp2x2-mxfp8_floor-head.fp8-ac.op-v2048-gb4-s2-b16",
    "tp2-tensorwise-head.fp8-v2256-vpad128-gb4-s2-f64",
    "tp2-nosp-nolp-rowwise-v2250-vpad128-gb4-s3-f64",
    "tp2-rowwise_with_gw_hp-head.fp8-ac.op-v2048-gb4-s2-f32",
    "tp2-nosp-nolp-tensorwise-tpstyle.fp8-v2048-gb4-s2-f32",
    "tp2-tensorwise-casts.i.dis+w.dis-v2048-gb4-s2-f64",
    "tp2-rowwise-casts.go_gw.ten+i.ten+w.ten-ac.op-v2048-gb4-s2-f64",
    "tp2-rowwise-v2048-gb4-s2-f32",
    "single-mxfp8_with_gw_hp-ac.layer2-bias-v2256-gb4-s2-eval-b16",
    "fsdp4-mxfp8-filter.w1+wk-v2048-gb4-s2-param.b16-b16",
    "tp2-rowwise-ac.op-v2048-gb4-s3-b16",
    "tp2-rowwise-filter.w1+wk-ac.op-bias-v2048-gb4-s2-f32",
    "tp2-tensorwise-kvheads.4-v2048-gb4-s2-f32",
    "tp2-tensorwise-tpstyle.fp8-ac.op-v2048-gb4-s2-f32",
    "tp2-tensorwise-tpstyle.fp8-v2250-vpad128-gb4-s3-f32",
    "tp2-nosp-nolp-tensorwise-v2048-gb4-s2-f32",
    "tp2-nosp-nolp-rowwise-v2250-vpad128-gb4-s3-f32",
    "tp4-bf16-v2050-gb4-s2-f32",
    "tp4-nolp-bf16-v2050-gb4-s2-f32",
    "fsdp2-tensorwise-v2048-gb4-s2-f32",
    "fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-f32",
    "fsdp2-tensorwise-ag.fp8pre-v2048-gb4-s2-param.b16-b16",
    "fsdp2-reshard.always-tensorwise-head.fp8-v2048-gb4-s3-b16",
    "fsdp2-reshard.always-tensorwise-ag.fp8-head.fp8-v2048-gb4-s2-b16",
    "fsdp2-reshard.never-tensorwise-ag.fp8-v2048-gb4-s2-f32",
    "fsdp2-reshard.never-tensorwise-ag.fp8pre-ac.layer2-v2050-gb4-s3-f32",
    "fsdp4-tensorwise-ag.fp8-v2050-gb4-s3-f64",
    "fsdp2-tp2-rowwise-ac.op-v2048-gb4-s2-accum2-f64",
    "hsdp2x2-tensorwise-v2048-gb4-s2-ignore.half-b16",
    "hsdp2x2-tensorwise-ag.fp8pre-head.fp8-ac.full-v2048-gb4-s3-b16",
]
NIGHTLY_COMPARED = [
    "hsdp2x2-rowwise-v2048-gb4-s2-ignore.half-param.b16-b16",
    "fsdp2-tp2-rowwise-ac.op-v2048-gb4-s2-eval-ignore.unequal-f64",
    "tp2-rowwise_with_gw_hp-ac.full-v2048-gb4-s2-f32",
    "fsdp2-tp2-bf16-v2048-s2-accum2-reduce.last-b16",
    "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-sgd-lr0.1-b16",
    "tp2-tensorwise-v2048-gb4-s2-f32",
    "tp2-tensorwise-v2048-gb4-s2-b16",
    "tp2-tensorwise-ac.op-v2048-gb4-s2-f64",
    "tp2-rowwise_with_gw_hp-v2048-gb4-s2-b16",
    "tp2-nosp-nolp-tensorwise-head.fp8-v2048-gb4-s2-f32",
    "tp4-tensorwise-v2050-gb4-s2-f64",
    "tp4-nosp-rowwise-ac.op-v2050-gb4-s2-b16",
    "fsdp2-tensorwise-ag.fp8-ac.layer2-v2048-gb4-s2-b16",
    "fsdp2-rowwise-ac.op-v2048-gb4-s2-b16",
    "fsdp3-tensorwise-v2048-gb3-s2-f32",
    "fsdp2-tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s2-b16",
    "hsdp2x2-tensorwise-v2048-gb4-s2-b16",
    "hsdp2x2-bf16-v2256-gb4-s2-f32",
    "hsdp2x2-tensorwise-v2048-gb4-s3-sgd-lr0.1-b16",
    "fsdp2-tp2-tensorwise-v2048-gb4-s3-sgd-lr0.1-f64",
    "hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s3-b16",
]
ALL = [*CASES, *COMPARED, *NIGHTLY, *NIGHTLY_COMPARED]
# Its scales are wrong by a recorded fault of torchao.
WRONG_SCALES = parse_case_id("fsdp2-tp2-tensorwise-ag.fp8pre-head.fp8-ac.layer2-v2048-gb4-s3-b16")

CHECKS: tuple[Callable[[Case, Run, Witnesses], list[Finding]], ...] = (
    check_traffic,
    check_scales,
    check_recompute,
    check_matmuls,
    check_memory,
    check_live_memory,
    check_leaks,
)


def each_of(texts: Iterable[str], *, replayed: bool = False) -> pytest.MarkDecorator:
    """A test of every case; only where sums over ranks have another order are modules replayed."""
    nightly = {*NIGHTLY, *NIGHTLY_COMPARED}
    cases = {text: parse_case_id(text) for text in texts}
    given = [
        pytest.param(case, id=text, marks=[pytest.mark.sweep] if text in nightly else [])
        for text, case in cases.items()
        if replayed_steps(case) or not replayed
    ]
    return pytest.mark.parametrize("case", given)


@pytest.fixture
def watched(trained) -> Callable[[Case], Run]:
    return lambda case: trained(case, probes=probes_for(case))


@each_of(ALL)
def test_no_check_has_a_finding(watched, case: Case):
    run = watched(case)
    assert [finding for check in CHECKS for finding in check(case, run, make_witnesses(case))] == []
    assert all(len(trace.operands.matmuls) == scaled_mm_calls(case) * case.train.steps for trace in run.traces)
    assert all((trace.traffic != ()) == (len(run.traces) > 1) for trace in run.traces)
    assert_saved_in_float8(case, run)


def assert_saved_in_float8(case: Case, run: Run) -> None:
    """Backward keeps float8 where inputs are cast before they are gathered, and nothing is computed again."""
    float8_saved = {saved.float8_bytes for trace in run.traces for saved in trace.saved_memory} != {0}
    assert float8_saved == (case.float8.tp_styles == "float8" and case.checkpointing.mode == "none")


@pytest.mark.sweep
def test_wrong_scales_take_no_memory(watched):
    run, witnesses = watched(WRONG_SCALES), make_witnesses(WRONG_SCALES)
    checks = (check_memory, check_live_memory, check_leaks)
    assert [finding for check in checks for finding in check(WRONG_SCALES, run, witnesses)] == []
    assert_saved_in_float8(WRONG_SCALES, run)


@each_of(ALL)
def test_what_is_multiplied_and_cast_is_what_the_formula_says(watched, case: Case):
    measurement = measured(case, watched(case), make_witnesses(case))
    assert measurement.flops == measurement.expected_flops
    assert measurement.cast_calls == measurement.expected_cast_calls


@each_of([*COMPARED, *NIGHTLY_COMPARED])
def test_probes_change_no_bit(watched, trained, case: Case):
    """That sketches change none, `test_sketches.py` shows."""
    run, plain = watched(case), trained(case)
    assert numbers(run.traces) == numbers(plain.traces)
    assert [trace.sketches for trace in run.traces] == [trace.sketches for trace in plain.traces]


@each_of([*CASES, *COMPARED, *NIGHTLY_COMPARED])
def test_one_rank_computes_the_same(watched, trained, case: Case):
    """In float64 any layout at every step; in other dtypes what adds up in the order of ranks, or as if it did.

    HSDP sums gradients in float32: those in bfloat16 have so few bits that no order shows.
    """
    run, solo = watched(case), trained(solo_case(case), solo=True, probes=("sketches", "operands"))
    assert first_divergence(case, run, solo) is None
    rounds = case.layout.tp > 1 or (case.layout.dp_replicate > 1 and case.train.dtype == "float32")
    if rounds and case.train.dtype != "float64":
        return
    allowed = EXACT if case.train.dtype == "float64" else ORDERED
    distances = worst_distances(run, solo, steps=range(1, case.train.steps + 1))
    assert largest(distances) <= allowed, f"by step: {distances}"
    tolerance = make_tolerance(*[allowed] * case.train.steps, name="parity")
    assert check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance)) == []


@each_of(ALL, replayed=True)
def test_a_replay_of_every_module_is_within_rounding(watched, train, case: Case):
    run = watched(case)
    again = Run(traces=train(case, replayed=tuple(trace.module_tensors for trace in run.traces)), failures=())
    assert check_local_parity(case, run, make_witnesses(case, replay=again)) == []
