"""The metrics of a case as text and JSON: formulas, a run held against them, and MFU with its definition."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.models import MODELS, training
from harness.plugins.predict.cost import CostReport, metrics, run_report
from harness.plugins.predict.sections import cost_sections
from harness.report.sections import text_of
from harness.result import CaseResult, Measured, Multiplied, Sent
from tests.builders import make_case, make_result, make_trace, run_of

CASE = parse_case_id("tp2-rowwise-v2048-s3-b16")
H100 = "NVIDIA H100 80GB HBM3"
FLOPS = {"matmuls in float8": Multiplied(calls=42, flops=8400)}


def result(case: Case = CASE, *, device: str = "cpu", **changes: Any) -> CaseResult:
    measured = Measured(flops=FLOPS, expected_flops=FLOPS, step_s=(9.0, 0.5, 0.5), **changes)
    traces = [make_trace(case, rank, device=device) for rank in range(case.world_size)]
    return make_result(case_id(case), run=run_of(*traces), measured=measured)


def text_of_report(report: CostReport) -> str:
    return text_of(cost_sections(report))


def test_formulas_of_a_case() -> None:
    text = text_of_report(CostReport(formula=metrics(CASE, rank=1)))
    assert "rank 1 of 2, step 2, 256 tokens: by formula, nothing was run" in text
    assert "executed matmuls in float8      42 calls" in text
    assert "casts to float8                 84" in text
    assert "reduce_scatter (sum) in bfloat16 along tp" in text
    formula = metrics(parse_case_id("fsdp2-tp2-rowwise-v2048-b16"))
    assert formula.wire_of_axis.keys() == {"dp_shard", "tp"}
    for axis, sent in formula.wire_of_axis.items():
        along = [collective for words, collective in formula.wire.items() if words.endswith(f"along {axis}")]
        assert (sent.calls, sent.payload_bytes) == (
            sum(collective.calls for collective in along),
            sum(collective.payload_bytes for collective in along),
        )


def test_a_case_that_torch_refuses_says_so() -> None:
    text = text_of_report(CostReport(formula=metrics(make_case(recipe="rowwise", output_layer=True, vocab_size=2050))))
    assert "torch refuses this case: " in text and "multiple of 16" in text


def test_what_has_no_formula() -> None:
    with pytest.raises(HarnessError, match="no formula for the model of my_pkg"):
        metrics(make_case(target="my_pkg.my_target"))
    with pytest.raises(HarnessError, match="ranks 0 to 1"):
        metrics(CASE, rank=2)
    compiled = metrics(make_case(recipe="tensorwise", compile="graph", dtype="bfloat16"))
    assert compiled.saved_bytes is None and "as the compiler chooses" in text_of_report(CostReport(formula=compiled))


def test_a_run_as_the_formulas_say() -> None:
    report = run_report(CASE, result())
    assert not report.differing
    text = text_of_report(report)
    assert "FLOPs of matmuls in float8     8,400    8,400  equal" in text
    assert "simulated, not gated" in text and "the peaks of cpu are not known" in text


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"cast_calls": 3, "expected_cast_calls": 4}, ["casts to float8"]),
        ({"cast_calls": 3}, []),
        ({"saved_bytes": 10, "expected_saved_bytes": 11}, ["bytes saved for backward"]),
        (
            {"wire": {"a": Sent(calls=1, payload_bytes=2)}, "expected_wire": {"b": Sent(calls=1, payload_bytes=2)}},
            ["bytes of b", "calls of b"],  # a kind that the formula leaves out is not compared
        ),
        ({"expected_wire": {"b": Sent(calls=1, payload_bytes=2)}}, []),  # nothing was recorded
    ],
)
def test_numbers_that_differ_are_named(changes: dict[str, Any], differing: list[str]) -> None:
    report = run_report(CASE, result(**changes))
    assert [row.what for row in report.differing] == differing
    assert text_of_report(report).count("DIFFERS") == len(differing)


def test_mfu_of_a_run_on_a_gpu_by_three_names() -> None:
    """8 x 8192 tokens of Llama 3 8B in 8 s on 8 devices: 1024 tokens/s a device; the first step warms up."""
    case = training(MODELS["llama3-8b"], recipe="tensorwise", dp_shard=8, steps=3)
    case_result = result(case, device=H100)
    assert case_result.measured is not None
    report = run_report(case, replace(case_result, measured=replace(case_result.measured, step_s=(99.0, 8.0, 8.0))))
    assert report.speed is not None and report.speed.tokens_per_s == 1024
    assert report.speed.tflops == pytest.approx(1024 * 57.91444992e9 / 1e12)
    document = json.loads(to_json(report))
    assert document["speed"]["mfu_bf16_peak"] == pytest.approx(59.304 / 989, rel=1e-4)
    assert document["speed"]["mfu_fp8_peak"] == pytest.approx(59.304 / 1979, rel=1e-4)
    assert document["speed"]["mfu_weighted"] == pytest.approx(59.304 / 1549.5, rel=1e-3)
    text = text_of_report(report)
    assert "simulated" not in text
    assert "all work over 989 TFLOP/s, the BF16 peak of h100" in text and "all work over 1979 TFLOP/s" in text


def test_an_unknown_device_has_no_mfu() -> None:
    report = run_report(CASE, result(device="NVIDIA H20"))
    assert report.speed is not None and report.speed.mfu_weighted is None
    assert "the peaks of NVIDIA H20 are not known: none is guessed" in text_of_report(report)


def test_a_run_in_which_nothing_finished() -> None:
    with pytest.raises(HarnessError, match="no rank finished"):
        run_report(CASE, make_result(case_id(CASE)))
