"""The advice about a case: what it recommends, as text, JSON and a page, and what the command refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.cli.main import main
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.models import MODELS, training
from harness.matrix.targets import is_llama
from harness.plugins.predict.advice import Advice, advise
from harness.plugins.predict.gains import plots, too_small_for_rowwise
from harness.plugins.predict.machine import machine
from harness.plugins.predict.sections import linear_row, speedup_page, speedup_sections
from harness.report.sections import text_of
from tests.builders import make_known
from tests.published import GRAND_TETON
from tests.strategies import DENSE_CASES
from tests.unit.test_html_report import Page

H100, B200 = machine("h100"), machine("b200")
ONE_NODE = training(MODELS["llama3-8b"], dp_shard=8, checkpointing="selective_op")


def debug(**axes: object) -> Case:
    return training(MODELS["debugmodel"], **{"vocab_size": 2256, **axes})


def said(advice: Advice, start: str) -> str:
    return next((line for line in advice.recommendations if line.startswith(start)), "")


def test_a_large_model_trains_faster_in_fp8() -> None:
    advice = advise(ONE_NODE, GRAND_TETON)
    ratios = {variant.name: variant.compiled or 0 for variant in advice.variants}
    assert list(ratios) == [
        "tensorwise",
        "tensorwise, float8 all-gather",
        "rowwise",
        "rowwise, wk, wv in BF16",
        "rowwise_with_gw_hp",
    ]
    assert max(ratios, key=ratios.__getitem__) == "tensorwise, float8 all-gather"
    assert advice.recommendations[0].startswith("Train with tensorwise, float8 all-gather: predicted 1.2")
    assert advice.recipe == "tensorwise" and "fp8" in advice.case
    assert said(advice, "Float8 all-gather changes the speed by +")
    assert said(advice, "Keep the output layer in BF16")
    assert not said(advice, "Do not convert") and not said(advice, "Tensor parallelism")


def test_parts_of_a_step_add_up() -> None:
    advice = advise(ONE_NODE, GRAND_TETON)
    for step in (advice.bf16, advice.float8):
        parts = step.device_s + step.tensor_parallel_s + step.data_parallel_s + step.other_s
        assert step.total_s == pytest.approx(parts)
    assert advice.bf16.matmul_s == pytest.approx(sum(linear.bf16_ms for linear in advice.linears) / 1e3)
    kept = sum(linear.bf16_ms - linear.float8_ms for linear in advice.linears if not linear.converted)
    assert advice.float8.matmul_s == pytest.approx((sum(linear.float8_ms for linear in advice.linears) + kept) / 1e3)
    assert advice.float8.cast_s * 1e3 == pytest.approx(
        sum(linear.cast_ms for linear in advice.linears if linear.converted)
    )


def test_a_small_eager_model_stays_in_bf16() -> None:
    advice = advise(debug(tokens=16384, recipe="tensorwise"), H100, eager=True)
    assert all((variant.eager or 1) < 1 for variant in advice.variants)
    assert "No linear of a block gains" in " ".join(advice.recommendations)
    assert advice.float8.total_s == advice.float8.dispatch_s


def test_rowwise_under_tensor_parallelism_loses_by_its_small_linears() -> None:
    case = training(MODELS["llama3-8b"], recipe="rowwise", tp=8, dp_shard=8, tokens=12 * 8192)
    advice = advise(case, H100)
    line = said(advice, "Do not convert what becomes slower with its casts: ")
    assert "--filter-fqns attention.wk" in line and "--filter-fqns attention.wv" in line and "w1" not in line
    assert too_small_for_rowwise(case) == ("attention.wk", "attention.wv")
    assert said(advice, "Tensor parallelism waits for wires")


def test_a_vocabulary_that_float8_refuses() -> None:
    advice = advise(debug(tp=8, recipe="tensorwise", output_layer=True), H100)
    assert {variant.refused for variant in advice.variants} == {"output_alignment"}
    assert advice.recommendations[0].startswith("No recipe trains this, by rule output_alignment: ")
    assert said(advice, "The output layer cannot be converted. Float8 matmuls refuse its shard of 282 rows.")
    assert linear_row(advice.linears[-1])[:2] == ("output x1", "refused")
    assert [matmul.role for matmul in advice.linears[-1].matmuls if matmul.refused] == ["forward", "dgrad"]
    assert [vocabulary.refused for vocabulary in advice.vocabulary] == [(282,), (), (), ()]


def test_tokens_that_float8_refuses() -> None:
    advice = advise(debug(recipe="tensorwise", seq_len=1000), H100)
    assert said(advice, "1000 tokens of a rank are no multiple of 16: --pad-inner-dim")
    padded = advise(debug(recipe="tensorwise", seq_len=1000, pad_inner_dim=True), H100)
    assert said(padded, "--pad-inner-dim copies operands for ") and padded.float8.padding_s > 0


def test_a_recipe_with_a_known_fault_is_not_recommended() -> None:
    case = training(MODELS["llama3-8b"], tp=8, dp_shard=64)
    fault = make_known(name="wrong-scale", where="fp8_all_gather=true tp>1", reason="The scale is wrong.")
    clean, warned = advise(case, H100), advise(case, H100, known=(fault,))
    assert clean.recommendations[0].startswith("Train with tensorwise, float8 all-gather")
    assert said(warned, "tensorwise, float8 all-gather, 1.2").endswith(f"The scale is wrong. ({fault.link})")
    assert [variant.fault for variant in warned.variants] == ["", "wrong-scale", "", "", ""]
    assert "wrong-scale" in text_of(speedup_sections(warned)) and "ag" not in warned.case.split("-")


def test_mxfp8_is_for_machines_that_multiply_it() -> None:
    advice = advise(ONE_NODE, B200)
    ratios = {variant.name: variant.ratio for variant in advice.variants}
    assert ratios["rowwise"] < ratios["mxfp8"] < ratios["tensorwise, float8 all-gather"]
    assert ratios["mxfp8_with_gw_hp"] < ratios["mxfp8"]
    assert not any("mxfp8" in variant.name for variant in advise(ONE_NODE, H100).variants)
    with pytest.raises(HarnessError, match=r"h100 has no matmuls in MXFP8.*give --machine b200"):
        advise(training(MODELS["llama3-8b"], recipe="mxfp8"), H100)
    short = advise(training(MODELS["llama3-8b"], recipe="mxfp8", tokens=1008, seq_len=1008), B200)
    assert said(short, "1008 tokens of a rank are no multiple of 32: another batch or length")


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(HarnessError, match="no formula for the model of my_pkg"):
        advise(replace(Case(), target="my_pkg.my_target"), H100)


@given(DENSE_CASES.filter(lambda case: is_llama(case.target)), st.booleans())
def test_every_case_has_an_advice(case: Case, eager: bool) -> None:
    advice = advise(case, B200 if case.float8.traits.in_blocks else H100, eager=eager)
    assert advice.recommendations and text_of(speedup_sections(advice))
    assert json.loads(to_json(advice))["float8_step_s"] == advice.float8.total_s
    numbers = [advice.tokens_s, advice.bf16.total_s, advice.float8.total_s, *(linear.gain for linear in advice.linears)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)


def test_text_says_that_nothing_was_measured() -> None:
    text = text_of(speedup_sections(advise(ONE_NODE, H100)))
    assert "on h100: predicted, not measured" in text and "Assumptions\n" in text
    assert max(map(len, text.splitlines()[:60])) < 250


def test_page() -> None:
    advice = advise(debug(tp=8), H100)
    page = Page(speedup_page(advice, plots(debug(tp=8), H100)))
    drawn = page.data()["drawings"]
    assert [len(plot["lines"]) for plot in drawn] == [3, 1, 3]
    assert all(len(line) == len(plot["places"]) for plot in drawn for line in plot["lines"].values())
    assert "default-src 'none'" in str(page.of("meta")) and "Permission is hereby granted" in page.inside[-1]
    assert advice.recommendations[0] in page.text


def test_plots_tell_what_the_rest_tells() -> None:
    case = training(MODELS["llama3-8b"], dp_shard=8, layers=4)
    size, vocabulary, world = plots(case, GRAND_TETON)
    ratios = {variant.name: variant.compiled for variant in advise(case, GRAND_TETON).variants}
    at = size.places.index(4096)
    assert size.lines["tensorwise"][at] == pytest.approx(ratios["tensorwise"], rel=0.03)
    assert vocabulary.lines["MB"][vocabulary.places.index(128256)] == 0
    wide, narrow, _ = world.lines.values()
    assert all(0.5 < less / more < 0.9 for more, less in zip(wide, narrow, strict=True))


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["predict", "speedup", "--model", "debugmodel", "--tp", "8", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "h100" and document["variants"] and document["recommendations"]
    assert main(["predict", "speedup", "tp2-rowwise-v2048-s2-f32", "--html", str(tmp_path / "advice.html")]) == 0
    assert (tmp_path / "advice.html").read_bytes().startswith(b"<!doctype html>")
    assert main(["predict", "speedup", "tp2-rowwise-v2048-s2-f32"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out
