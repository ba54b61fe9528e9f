"""Clean runs of every kind on real ranks: with all probes at once no check has a finding, and no bit changes.

What injected faults do to the same records is told by the file of each probe.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checks.assembly import largest
from harness.checks.check import Witnesses
from harness.checks.divergence import with_operands
from harness.checks.fp8_on import check_matmuls
from harness.checks.measuring import measured
from harness.checks.memory import check_leaks, check_live_memory, check_memory
from harness.checks.module_replay import check_module_replay
from harness.checks.parity import check_parity, worst_distances
from harness.checks.recompute import check_recompute
from harness.checks.scales import check_scales
from harness.checks.traffic import check_traffic
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.matrix.numerics import replayed_steps
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_tolerance, make_witnesses, probes_for
from tests.worker.runs import numbers

# Distance from the solo witness where sums have the order of ranks, and in float64.
ORDERED, EXACT = 1e-8, 1e-12  # measured: below 4e-9 and 2e-15

EVERY_RUN = tomllib.loads(Path(__file__).with_name("clean_runs.toml").read_text())
NIGHTLY = EVERY_RUN.pop("nightly")
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


def each_of(*lists: str, replayed: bool = False) -> pytest.MarkDecorator:
    """A test of every case; only where sums over ranks have another order are modules replayed."""
    cases = [
        pytest.param(case, id=text, marks=marks)
        for group, marks in ((EVERY_RUN, ()), (NIGHTLY, pytest.mark.sweep))
        for text, case in {text: parse_case_id(text) for name in lists for text in group[name]}.items()
        if replayed_steps(case) or not replayed
    ]
    return pytest.mark.parametrize("case", cases)


@pytest.fixture
def watched(trained) -> Callable[[Case], Run]:
    return lambda case: trained(case, probes=probes_for(case))


@each_of("cases", "compared")
def test_no_check_has_a_finding(watched, case: Case):
    run = watched(case)
    assert [finding for check in CHECKS for finding in check(case, run, make_witnesses(case))] == []
    matmuls = Expectations(case).scaled_mm_calls[1] * case.train.steps
    assert all(len(trace.operands.matmuls) == matmuls for trace in run.traces)
    assert all((trace.traffic != ()) == (len(run.traces) > 1) for trace in run.traces)
    assert_saved_in_float8(case, run)


def assert_saved_in_float8(case: Case, run: Run) -> None:
    """Backward keeps float8 where inputs are cast before they are gathered, and nothing is computed again."""
    kept = case.float8.tp_styles == "float8" and case.checkpointing.mode == "none"
    assert kept == any("float8" in str(saved.by_dtype) for trace in run.traces for saved in trace.saved_memory)


@pytest.mark.sweep
def test_wrong_scales_take_no_memory(watched):
    run, witnesses = watched(WRONG_SCALES), make_witnesses(WRONG_SCALES)
    checks = (check_memory, check_live_memory, check_leaks)
    assert [finding for check in checks for finding in check(WRONG_SCALES, run, witnesses)] == []
    assert_saved_in_float8(WRONG_SCALES, run)


@each_of("cases", "compared")
def test_what_is_multiplied_and_cast_is_what_the_formula_says(watched, case: Case):
    measurement = measured(case, watched(case), make_witnesses(case))
    packed = case.train.packing != "none"  # what documents attend to is no formula's
    assert measurement.expected_flops == ({} if packed else measurement.flops)
    assert measurement.cast_calls == measurement.expected_cast_calls


@each_of("compared")
def test_probes_change_no_bit(watched, trained, case: Case):
    """That sketches change none, `test_sketches.py` shows."""
    run, plain = watched(case), trained(case)
    assert numbers(run.traces) == numbers(plain.traces)
    assert [trace.sketches for trace in run.traces] == [trace.sketches for trace in plain.traces]


@each_of("compared", "one_rank")
def test_one_rank_computes_the_same(watched, trained, case: Case):
    """In float64 any layout at every step; in other dtypes what adds up in the order of ranks, or as if it did.

    HSDP sums gradients in float32: those in bfloat16 have so few bits that no order shows.
    """
    run, solo = watched(case), trained(solo_case(case), solo=True, probes=("sketches", "operands"))
    assert with_operands((), case, run, solo) == ()
    rounds = case.layout.tp > 1 or (case.layout.dp_replicate > 1 and case.train.dtype == "float32")
    if rounds and case.train.dtype != "float64":
        return
    allowed = EXACT if case.train.dtype == "float64" else ORDERED
    distances = worst_distances(run, solo, steps=range(1, case.train.steps + 1))
    assert largest(distances) <= allowed, f"by step: {distances}"
    tolerance = make_tolerance(*[allowed] * case.train.steps, name="parity")
    assert check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance)) == []


@each_of("cases", "compared", replayed=True)
def test_a_replay_of_every_module_is_within_rounding(watched, train, case: Case):
    run = watched(case)
    again = Run(traces=train(case, replayed=tuple(trace.module_tensors for trace in run.traces)), failures=())
    assert check_module_replay(case, run, make_witnesses(case, replay=again)) == []
