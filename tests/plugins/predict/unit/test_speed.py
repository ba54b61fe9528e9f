"""The speed-up over BF16: its interval, the conditions of the machine, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Float8
from harness.matrix.caseid import case_id, parse_case_id
from harness.plugins.predict.gains import CaseSpeed, SpeedReport, Timed, interval, speedup, t_quantile, timed_case
from harness.plugins.predict.sections import speed_sections
from harness.plugins.release.gate import gate
from harness.plugins.release.reason import Kind
from harness.report.sections import text_of
from harness.result import Environment, Speedup
from harness.running.conditions import Conditions, ConditionsMonitor, conditions, worst
from harness.verdict import Verdict
from tests.builders import make_measured, make_result, make_results
from tests.nvidia import put_nvidia_smi
from tests.plugins.release.unit.test_gate import TERMS

CASE = parse_case_id("fsdp2-tensorwise-v2048-b16")
TWIN = replace(CASE, float8=Float8())
QUIET = Conditions(load=1.0)
RATIOS = st.lists(st.floats(0.1, 10), min_size=3, max_size=12)


def timed(pairs: Sequence[tuple[float, float]], device: str = "cpu") -> CaseSpeed:
    timings = tuple(Timed(twin_s=twin_s, case_s=case_s, conditions=QUIET) for twin_s, case_s in pairs)
    return CaseSpeed(
        case_id=case_id(CASE),
        twin_id=case_id(TWIN),
        device=device,
        pairs=timings,
        speedup=speedup(CASE, TWIN, timings),
    )


@pytest.mark.parametrize(
    ("degrees", "exact"), [(2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (29, 2.0452), (120, 1.9799)]
)
def test_quantiles_of_student_against_tables(degrees: int, exact: float) -> None:
    assert t_quantile(degrees) == pytest.approx(exact, rel=0.01)


def test_an_interval_by_hand() -> None:
    ratio, low, high = interval([1.1, 1.2, 1.3])
    assert ratio == pytest.approx(1.1972, abs=1e-4)  # the cube root of 1.716
    assert (low, high) == pytest.approx((0.972, 1.475), abs=0.005)  # logarithms: mean 0.1800, deviation 0.0836


@given(RATIOS, st.floats(0.5, 2))
def test_an_interval_holds_its_ratio_and_scales_with_the_ratios(ratios: list[float], factor: float) -> None:
    ratio, low, high = interval(ratios)
    assert low <= ratio * (1 + 1e-12) and ratio <= high * (1 + 1e-12)
    assert min(ratios) <= ratio * (1 + 1e-12) and ratio <= max(ratios) * (1 + 1e-12)
    assert interval([number * factor for number in ratios]) == pytest.approx(
        [number * factor for number in (ratio, low, high)]
    )
    swapped = interval([1 / number for number in ratios])
    assert swapped == pytest.approx((1 / ratio, 1 / high, 1 / low))


def test_what_cannot_be_timed() -> None:
    with pytest.raises(HarnessError, match="converts nothing"):
        timed_case(TWIN, warmup=1, steps=2)
    with pytest.raises(HarnessError, match="torch refuses"):
        timed_case(parse_case_id("tp2-tensorwise-head.fp8-v2256-s2-f64"), warmup=1, steps=2)
    with pytest.raises(HarnessError, match="resumed"):
        timed_case(parse_case_id("fsdp4-tensorwise-ag.fp8pre-v2048-s3-resume.resharded-f64"), warmup=1, steps=2)
    assert timed_case(CASE, warmup=3, steps=10).train.steps == 13


def test_speeds_of_both_with_mfu_on_a_gpu() -> None:
    case_speed = timed([(0.64, 0.5), (0.65, 0.5), (0.63, 0.5)], "NVIDIA H100 80GB HBM3")
    text = text_of(speed_sections(SpeedReport(gated=True, warmup=3, cases=(case_speed,))))
    assert "1.280 times as fast as fsdp2-bf16-v2048-b16: 1.2" in text and ", 3 pairs" in text
    assert "simulated" not in text and "mfu_weighted" in text and "Student's t" in text
    tokens = CASE.train.tokens / 2
    assert case_speed.speedup is not None
    assert (case_speed.speedup.tokens_per_s, case_speed.speedup.twin_tokens_per_s) == (tokens / 0.5, tokens / 0.64)


def test_seconds_of_a_cpu_are_simulated() -> None:
    report = SpeedReport(gated=False, warmup=3, cases=(timed([(1, 2), (1, 2.1), (1, 1.9)]),))
    assert "(simulated, not gated: a CPU computes float8 with the virtual device)" in text_of(speed_sections(report))
    document = json.loads(to_json(report))
    assert document["gated"] is False and document["cases"][0]["pairs"][1]["case_s"] == 2.1


def test_a_job_that_failed_is_no_speed() -> None:
    failed = make_result(case_id(CASE), Verdict.CRASH)
    case_speed = CaseSpeed(case_id=case_id(CASE), twin_id=case_id(TWIN), failed=failed)
    text = text_of(speed_sections(SpeedReport(gated=False, warmup=1, cases=(case_speed,))))
    assert "not timed: fsdp2-tensorwise-v2048-b16 crashed" in text


def fast(ratio: float, low: float, high: float) -> Speedup:
    return Speedup(twin="t", pairs=6, ratio=ratio, low=low, high=high, tokens_per_s=1.0, twin_tokens_per_s=1.0)


@pytest.mark.parametrize(
    ("device", "after", "gates"),
    [
        ("NVIDIA H200", fast(1.1, 1.08, 1.12), True),
        ("NVIDIA H200", fast(1.3, 1.28, 1.32), False),
        ("NVIDIA H200", fast(1.18, 1.17, 1.195), None),  # the intervals touch
        ("cpu", fast(0.4, 0.39, 0.41), None),
    ],
)
def test_the_gate_compares_intervals_on_a_gpu_alone(device: str, after: Speedup, gates: bool | None) -> None:
    runs = []
    for measured_speedup in (fast(1.2, 1.19, 1.21), after):
        measured = make_measured(speedup=measured_speedup)
        runs.append(make_results(make_result(case_id(CASE), measured=measured), environment=Environment(device=device)))
    decision = gate(*runs, TERMS)
    assert [reason.gates for reason in decision.reasons] == ([] if gates is None else [gates])
    assert all(reason.kind is Kind.TIMES for reason in decision.reasons)


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, *rows: str) -> None:
    """The GPUs of this machine have these conditions."""
    monkeypatch.setenv("PATH", put_nvidia_smi(folder, gpu="".join(f"{row}\n" for row in rows)))


def test_conditions_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "1980, 54, 0x0000000000000000", "1410, 71, 0x0000000000000024")
    gpu_conditions = conditions("cuda")
    assert (gpu_conditions.lowest_sm_mhz, gpu_conditions.highest_sm_mhz, gpu_conditions.celsius) == (1410, 1980, 71)
    assert gpu_conditions.words.endswith("SM clocks 1410 to 1980 MHz, 71 °C, throttled by power and heat")
    assert conditions("cpu").lowest_sm_mhz is None


def test_a_gpu_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "[N/A], [N/A], [N/A]")
    unknown = conditions("cuda")
    assert (unknown.lowest_sm_mhz, unknown.throttled) == (None, ()) and unknown.words.startswith("load ")


def test_the_worst_is_over_all_that_was_seen() -> None:
    seen = (
        Conditions(load=2.0, lowest_sm_mhz=1500, highest_sm_mhz=1980, celsius=60, throttled=("heat",)),
        Conditions(load=1.0, lowest_sm_mhz=1200, highest_sm_mhz=1300, celsius=70, throttled=("power",)),
        Conditions(load=3.0),
    )
    expected = Conditions(load=3.0, lowest_sm_mhz=1200, highest_sm_mhz=1980, celsius=70, throttled=("power", "heat"))
    assert worst(seen) == expected
    with ConditionsMonitor("cpu") as watch:
        pass
    assert watch.seen.load >= 0
