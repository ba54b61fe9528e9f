"""What FP8 is predicted to gain: ratios and linears, as text and JSON, and what the command refuses."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.cli.main import main
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.models import MODELS, training
from harness.plugins.predict.gains import predicted_gains, too_small_for_rowwise
from harness.plugins.predict.machine import machine
from harness.plugins.predict.sections import linear_row, speedup_sections
from harness.registry import is_llama
from harness.report.sections import text_of
from tests.builders import make_known
from tests.published import GRAND_TETON
from tests.strategies import DENSE_CASES

H100, B200 = machine("h100"), machine("b200")
ONE_NODE = training(MODELS["llama3-8b"], dp_shard=8, checkpointing="selective_op")


def debug(**axes: object) -> Case:
    return training(MODELS["debugmodel"], **{"vocab_size": 2256, **axes})


def test_a_large_model_trains_faster_in_fp8() -> None:
    gains = predicted_gains(ONE_NODE, GRAND_TETON)
    ratios = {variant.name: variant.compiled or 0 for variant in gains.variants}
    assert list(ratios) == [
        "tensorwise",
        "tensorwise, float8 all-gather",
        "rowwise",
        "rowwise, wk, wv in BF16",
        "rowwise_with_gw_hp",
    ]
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
    assert gains.float8.cast_s * 1e3 == pytest.approx(
        sum(linear.cast_ms for linear in gains.linears if linear.converted)
    )


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


def test_a_vocabulary_that_float8_refuses() -> None:
    gains = predicted_gains(debug(tp=8, recipe="tensorwise", output_layer=True), H100)
    assert {variant.refused for variant in gains.variants} == {"output_alignment"}
    assert gains.linears[-1].refused and gains.linears[-1].matmuls[0].n == 282
    assert linear_row(gains.linears[-1])[:2] == ("output x1", "refused")
    assert [matmul.role for matmul in gains.linears[-1].matmuls if matmul.refused] == ["forward", "dgrad"]


def test_tokens_that_float8_refuses() -> None:
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


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(HarnessError, match="no formula for the model of my_pkg"):
        predicted_gains(replace(Case(), target="my_pkg.my_target"), H100)


@given(DENSE_CASES.filter(lambda case: is_llama(case.target)), st.booleans())
def test_every_case_has_a_prediction(case: Case, eager: bool) -> None:
    gains = predicted_gains(case, B200 if case.float8.traits.in_blocks else H100, eager=eager)
    assert text_of(speedup_sections(gains))
    assert json.loads(to_json(gains))["float8_step_s"] == gains.float8.total_s
    numbers = [gains.tokens_s, gains.bf16.total_s, gains.float8.total_s, *(linear.gain for linear in gains.linears)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_text_says_that_nothing_was_measured() -> None:
    text = text_of(speedup_sections(predicted_gains(ONE_NODE, H100)))
    assert "on h100: predicted, not measured" in text and "Assumptions\n" in text
    assert max(map(len, text.splitlines()[:60])) < 250


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "speedup", "--model", "debugmodel", "--tp", "8", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "h100" and document["variants"] and document["linears"]
    assert main(["predict", "speedup", "tp2-rowwise-v2048-s2-f32"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out
