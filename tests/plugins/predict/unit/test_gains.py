"""What FP8 gains, predicted and timed: ratios, intervals and linears, as text and JSON, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.cli.main import main
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.models import MODELS, training
from harness.plugins.predict.conditions import Conditions, ConditionsMonitor, conditions, worst
from harness.plugins.predict.gains import (
    CaseSpeed,
    SpeedReport,
    Timed,
    interval,
    predicted_gains,
    speedup,
    t_quantile,
    timed_case,
    too_small_for_rowwise,
)
from harness.plugins.predict.machine import machine
from harness.plugins.predict.sections import linear_row, speed_sections, speedup_sections
from harness.plugins.release.gate import gate
from harness.plugins.release.sides import Kind
from harness.registry import is_llama
from harness.report.sections import text_of
from harness.result import Environment, Speedup
from harness.verdict import Verdict
from tests.builders import make_known, make_measured, make_result, make_results
from tests.nvidia import put_nvidia_smi
from tests.plugins.predict.unit.published import GRAND_TETON
from tests.plugins.release.unit.test_gate import TERMS
from tests.strategies import DENSE_CASES

H100, B200 = machine("h100"), machine("b200")
ONE_NODE = training(MODELS["llama3-8b"], dp_shard=8, checkpointing="selective_op")


def debug(**axes: object) -> Case:
    return training(MODELS["debugmodel"], **{"vocab_size": 2256, **axes})


def test_a_large_model_trains_faster_in_fp8() -> None:
    gains = predicted_gains(ONE_NODE, GRAND_TETON)
    ratios = {variant.name: variant.compiled or 0 for variant in gains.variants}
    of_rowwise = ["rowwise", "rowwise, wk, wv in BF16", "rowwise_with_gw_hp"]
    assert list(ratios) == ["tensorwise", "tensorwise, float8 all-gather", *of_rowwise]
    assert max(ratios, key=ratios.__getitem__) == "tensorwise, float8 all-gather"
    assert max(ratios.values()) == pytest.approx(1.24, abs=0.05)
    assert gains.recipe == "tensorwise" and "fp8" in gains.case
    assert all(linear.gain > 1 for linear in gains.linears)
    assert [linear.name for linear in gains.linears if not linear.converted] == ["output"]
    assert gains.float8.tensor_parallel_s == 0


def test_parts_of_a_step_add_up() -> None:
    gains = predicted_gains(ONE_NODE, GRAND_TETON)
    for step in (gains.bf16, gains.float8):
        parts = step.device_s + step.tensor_parallel_s + step.data_parallel_s + step.other_s
        assert step.total_s == pytest.approx(parts)
    assert gains.bf16.matmul_s == pytest.approx(sum(linear.bf16_ms for linear in gains.linears) / 1e3)
    kept = sum(linear.bf16_ms - linear.float8_ms for linear in gains.linears if not linear.converted)
    assert gains.float8.matmul_s == pytest.approx((sum(linear.float8_ms for linear in gains.linears) + kept) / 1e3)
    casts_ms = sum(linear.cast_ms for linear in gains.linears if linear.converted)
    assert gains.float8.cast_s * 1e3 == pytest.approx(casts_ms)


def test_a_small_eager_model_stays_in_bf16() -> None:
    gains = predicted_gains(debug(tokens=16384, recipe="tensorwise"), H100, eager=True)
    assert all((variant.eager or 1) < 1 for variant in gains.variants)
    assert all(linear.gain < 1 for linear in gains.linears[:-1])
    assert gains.float8.total_s == gains.float8.dispatch_s


def test_rowwise_under_tensor_parallelism_loses_by_its_small_linears() -> None:
    case = training(MODELS["llama3-8b"], recipe="rowwise", tp=8, dp_shard=8, tokens=12 * 8192)
    gains = predicted_gains(case, H100)
    slow = {linear.name for linear in gains.linears if linear.converted and linear.gain < 1}
    assert slow >= {"attention.wk", "attention.wv"} and "feed_forward.w1" not in slow
    assert too_small_for_rowwise(case) == ("attention.wk", "attention.wv")
    assert gains.float8.tensor_parallel_s > 0.1 * gains.float8.total_s


def test_a_vocabulary_and_tokens_that_float8_refuses() -> None:
    gains = predicted_gains(debug(tp=8, recipe="tensorwise", output_layer=True), H100)
    assert {variant.refused for variant in gains.variants} == {"output_alignment"}
    assert gains.linears[-1].refused and gains.linears[-1].matmuls[0].n == 282
    assert linear_row(gains.linears[-1])[:2] == ("output x1", "refused")
    assert [matmul.role for matmul in gains.linears[-1].matmuls if matmul.refused] == ["forward", "dgrad"]
    gains = predicted_gains(debug(recipe="tensorwise", seq_len=1000), H100)
    wgrad = gains.linears[0].matmuls[-1]
    assert (wgrad.role, wgrad.k, wgrad.refused) == ("wgrad", 1000, True)
    padded = predicted_gains(debug(recipe="tensorwise", seq_len=1000, pad_inner_dim=True), H100)
    assert not padded.linears[0].refused and padded.float8.padding_s > 0


def test_a_recipe_with_a_known_fault_is_not_chosen() -> None:
    case = training(MODELS["llama3-8b"], tp=8, dp_shard=64)
    fault = make_known(name="wrong-scale", where="fp8_all_gather=true tp>1", reason="The scale is wrong.")
    clean, warned = predicted_gains(case, H100), predicted_gains(case, H100, known=(fault,))
    assert max(clean.variants, key=lambda variant: variant.ratio).name == "tensorwise, float8 all-gather"
    assert any(word.startswith("ag") for word in clean.case.split("-"))
    assert [variant.fault for variant in warned.variants] == ["", "wrong-scale", "", "", ""]
    assert "wrong-scale" in text_of(speedup_sections(warned))
    assert not any(word.startswith("ag") for word in warned.case.split("-"))


def test_mxfp8_is_for_machines_that_multiply_it() -> None:
    gains = predicted_gains(ONE_NODE, B200)
    ratios = {variant.name: variant.ratio for variant in gains.variants}
    assert ratios["rowwise"] < ratios["mxfp8"] < ratios["tensorwise, float8 all-gather"]
    assert ratios["mxfp8_with_gw_hp"] < ratios["mxfp8"]
    assert not any("mxfp8" in variant.name for variant in predicted_gains(ONE_NODE, H100).variants)
    with pytest.raises(HarnessError, match=r"h100 has no matmuls in MXFP8.*give --machine b200"):
        predicted_gains(training(MODELS["llama3-8b"], recipe="mxfp8"), H100)
    short = predicted_gains(training(MODELS["llama3-8b"], recipe="mxfp8", tokens=1008, seq_len=1008), B200)
    assert short.linears[0].matmuls[-1].refused


@given(DENSE_CASES.filter(lambda case: is_llama(case.target)), st.booleans())
def test_every_case_has_a_prediction(case: Case, eager: bool) -> None:
    gains = predicted_gains(case, B200 if case.float8.traits.block else H100, eager=eager)
    assert text_of(speedup_sections(gains))
    assert json.loads(to_json(gains))["float8_step_s"] == gains.float8.total_s
    numbers = [gains.tokens_s, gains.bf16.total_s, gains.float8.total_s, *(linear.gain for linear in gains.linears)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(speedup_sections(predicted_gains(ONE_NODE, H100)))
    assert "on h100: predicted, not measured" in text and "Assumptions\n" in text
    assert max(map(len, text.splitlines()[:60])) < 250
    assert main(["predict", "speedup", "--model", "debugmodel", "--tp", "8", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "h100" and document["variants"] and document["linears"]
    assert main(["predict", "speedup", "tp2-rowwise-v2048-s2-f32"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out


CASE = parse_case_id("fsdp2-tensorwise-v2048-b16")
TWIN = replace(CASE, float8=Float8())
QUIET = Conditions(load=1.0)
RATIOS = st.lists(st.floats(0.1, 10), min_size=3, max_size=12)


def timed(pairs: Sequence[tuple[float, float]], device: str = "cpu") -> CaseSpeed:
    timings = tuple(Timed(twin_s=twin_s, case_s=case_s, conditions=QUIET) for twin_s, case_s in pairs)
    return CaseSpeed(
        case_id=case_id(CASE), twin_id=case_id(TWIN), device=device, pairs=timings, speedup=speedup(CASE, TWIN, timings)
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
    scaled = [number * factor for number in (ratio, low, high)]
    assert interval([number * factor for number in ratios]) == pytest.approx(scaled)
    swapped = interval([1 / number for number in ratios])
    assert swapped == pytest.approx((1 / ratio, 1 / high, 1 / low))


def test_what_cannot_be_timed() -> None:
    with pytest.raises(HarnessError, match="converts nothing"):
        timed_case(TWIN, warmup=1, steps=2)
    with pytest.raises(HarnessError, match="torch rejects"):
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
