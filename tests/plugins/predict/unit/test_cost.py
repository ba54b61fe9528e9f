"""The metrics of a case: formulas of work, a run held against them, MFU with its definition; as text and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.work import ATTENTION, executed, gemms, work
from harness.jsonform import to_json
from harness.matrix import linears
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.linears import is_misaligned, parameter_count
from harness.matrix.models import MODELS, training
from harness.plugins.predict.commands import named_model
from harness.plugins.predict.cost import (
    CostReport,
    flops_per_token,
    flops_per_token_by_precision,
    metrics,
    run_report,
    speed,
    tokens_per_device,
)
from harness.plugins.predict.machine import PEAKS, peak, peak_of_device
from harness.plugins.predict.sections import cost_sections
from harness.registry import is_llama
from harness.report.sections import text_of
from harness.result import CaseResult, Measured, Multiplied, Sent
from harness.trace.counts import FLOAT8
from tests.builders import make_case, make_result, make_trace, run_of
from tests.strategies import TRAINED_DENSE_CASES

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
    text = text_of_report(CostReport(formula=metrics(make_case(recipe="rowwise", output_layer=True, vocab_size=2050))))
    assert "torch rejects this case: " in text and "multiple of 16" in text
    text = text_of_report(CostReport(formula=metrics(CASE, rank=1)))
    assert "rank 1 of 2, step 2, 256 tokens: by formula, nothing was run" in text
    assert "executed matmuls in float8      42 calls" in text
    assert "casts to float8                 84" in text
    assert "reduce_scatter (sum) in bfloat16 along tp" in text
    formula = metrics(parse_case_id("fsdp2-tp2-rowwise-v2048-b16"))
    assert formula.wire_of_axis.keys() == {"dp_shard", "tp"}
    for axis, sent in formula.wire_of_axis.items():
        along = [collective for words, collective in formula.wire.items() if words.endswith(f"along {axis}")]
        assert sent.calls == sum(collective.calls for collective in along)
        assert sent.payload_bytes == sum(collective.payload_bytes for collective in along)


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
    assert "simulated, not gated" in text and "the peaks of cpu are not known: none is guessed" in text
    assert report.speed is not None and report.speed.mfu_weighted is None


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


def test_a_run_in_which_nothing_finished() -> None:
    with pytest.raises(HarnessError, match="no rank finished"):
        run_report(CASE, make_result(case_id(CASE)))


LLAMA_8B = training(MODELS["llama3-8b"], recipe="tensorwise")
DEBUG = training(MODELS["debugmodel"], recipe="tensorwise", vocab_size=2256)


def in_bf16(case: Case) -> Case:
    return replace(case, float8=Float8())


def test_flops_of_a_token_of_llama_3_8b() -> None:
    by_hand = 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192
    assert flops_per_token(LLAMA_8B) == by_hand == 57_914_449_920
    parts = flops_per_token_by_precision(LLAMA_8B)
    assert parts["float8"] / flops_per_token(LLAMA_8B) == pytest.approx(0.723, abs=5e-4)


@pytest.mark.parametrize(
    ("case", "tokens_per_s", "tflops", "bf16_peak", "fp8_peak", "weighted"),
    [
        (in_bf16(LLAMA_8B), 6297, 364.69, 0.3687, 0.1843, 0.3687),
        (LLAMA_8B, 7773, 450.17, 0.4552, 0.2275, 0.2905),
        (in_bf16(DEBUG), 450_700, 32.41, 0.0328, 0.0164, 0.0328),
        (DEBUG, 365_200, 26.26, 0.0266, 0.0133, 0.0209),
    ],
)
def test_speed_and_mfu_of_published_runs(
    case: Case, tokens_per_s: float, tflops: float, bf16_peak: float, fp8_peak: float, weighted: float
) -> None:
    run_speed = speed(case, tokens_per_s, peak("h100"))
    assert run_speed.tflops == pytest.approx(tflops, abs=0.005)
    assert run_speed.mfu_bf16_peak == pytest.approx(bf16_peak, abs=5e-5)
    assert run_speed.mfu_fp8_peak == pytest.approx(fp8_peak, abs=5e-5)
    assert run_speed.mfu_weighted == pytest.approx(weighted, abs=5e-5)


def test_only_the_weighted_mfu_reaches_one() -> None:
    parts = flops_per_token_by_precision(LLAMA_8B)
    ideal_s = parts["float8"] / 1979e12 + parts["bfloat16"] / 989e12
    ideal = speed(LLAMA_8B, 1 / ideal_s, peak("h100"))
    assert ideal.mfu_weighted == pytest.approx(1)
    assert ideal.mfu_bf16_peak is not None and ideal.mfu_bf16_peak > 1.5
    assert ideal.mfu_fp8_peak is not None and ideal.mfu_fp8_peak < 0.8


def test_no_mfu_without_a_peak() -> None:
    unknown = speed(LLAMA_8B, 1000, None)
    assert (unknown.mfu_bf16_peak, unknown.mfu_fp8_peak, unknown.mfu_weighted) == (None, None, None)
    assert speed(LLAMA_8B, 1000, peak("a100")).mfu_weighted is None  # it has no float8 matmuls
    assert speed(in_bf16(LLAMA_8B), 1000, peak("a100")).mfu_weighted is not None
    in_float32 = replace(LLAMA_8B, train=replace(LLAMA_8B.train, dtype="float32"))
    assert speed(in_float32, 1000, peak("h100")).mfu_weighted is None


def test_devices_are_known_by_the_whole_name_of_torch() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H200": "h200"}
    assert {name: known_peak.name for name in names if (known_peak := peak_of_device(name))} == names
    for name in ("cpu", "", "NVIDIA H100", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20"):
        assert peak_of_device(name) is None
    with pytest.raises(HarnessError, match="give one of h100, h100-pcie"):
        peak("h20")
    assert len({device.name for device in PEAKS}) == len(PEAKS)


def test_tokens_of_a_device_are_its_share() -> None:
    assert tokens_per_device(training(MODELS["llama3-8b"], dp_shard=8), 2.0) == 8192 * 8 / 2 / 8
    assert tokens_per_device(training(MODELS["llama3-8b"], dp_shard=2, tp=4), 2.0) == 8192 * 2 / 2 / 8


def test_models_are_of_the_published_sizes() -> None:
    sizes = {name: parameter_count(training(model)) for name, model in MODELS.items()}
    assert sizes["llama3-8b"] == 8_030_261_248
    assert sizes["llama3-70b"] == 70_553_706_496
    assert sizes["llama3-405b"] == 405_853_388_800
    with pytest.raises(HarnessError, match="give one of debugmodel, llama3-8b"):
        named_model("gpt2")


def test_tokens_of_a_rank_are_whole_sequences() -> None:
    assert training(MODELS["llama3-8b"], tokens=16384, dp_shard=4).train.global_batch == 8
    for tokens in (0, 100, 12288):
        with pytest.raises(HarnessError, match="multiple of 8192"):
            training(MODELS["llama3-8b"], tokens=tokens)


def test_shapes_after_tensor_parallelism() -> None:
    case = training(MODELS["llama3-8b"], recipe="tensorwise", output_layer=True, vocab_size=2256)
    by_rank = {rank: gemms(replace(case, layout=Layout(tp=8)), rank=rank) for rank in range(8)}
    wo = next(gemm for gemm in by_rank[3] if gemm.fqn == "layers.0.attention.wo" and gemm.role == "dgrad")
    assert (wo.m, wo.n, wo.k, wo.precision, wo.aligned) == (8192, 512, 4096, "float8", True)
    heads = [next(gemm for gemm in rank_gemms if gemm.fqn == "output") for rank_gemms in by_rank.values()]
    assert {(gemm.n, gemm.aligned) for gemm in heads} == {(282, False)}


def test_high_precision_weight_gradients_and_filters() -> None:
    case = replace(LLAMA_8B, float8=Float8(recipe="rowwise_with_gw_hp", filter_fqns=("attention.wk",)))
    precisions = {(gemm.fqn, gemm.role): gemm.precision for gemm in gemms(case)}
    assert precisions["layers.3.attention.wq", "wgrad"] == "bfloat16"
    assert precisions["layers.3.attention.wq", "dgrad"] == "float8"
    assert precisions["layers.3.attention.wk", "forward"] == precisions["output", "forward"] == "bfloat16"


@pytest.mark.parametrize(
    ("mode", "recipe", "factor"),
    [
        ("none", "bf16", 3),
        ("full", "tensorwise", 4),
        ("full", "bf16", 4 - 1 / 7),  # the last linear has saved its input before it would multiply again
        ("selective_layer", "tensorwise", 3.5),
        ("selective_op", "bf16", 3 + 3 / 7),
    ],
)
def test_recomputation_is_executed_and_not_needed(mode: str, recipe: str, factor: float) -> None:
    """Matmuls of a block: 7 in forward, 14 in backward, and those that checkpointing repeats."""
    case = training(MODELS["llama3-8b"], checkpointing=mode, recipe=recipe)
    blocks = [gemm for gemm in gemms(case) if gemm.fqn != "output"]
    executions = sum(gemm.executions for gemm in blocks)
    assert executions / (7 * 32) == pytest.approx(factor)
    assert sum(gemm.flops for gemm in blocks) == 6 * 8192 * 32 * (2 * 4096 * 5120 + 3 * 4096 * 14336)


def test_attention_is_recomputed_where_its_output_is_not_saved() -> None:
    case = training(MODELS["llama3-8b"], checkpointing="selective_op")
    for saved, factor in ((True, 1), (False, 2)):
        forward = next(entry for entry in work(case, saves_attention=saved) if entry.part == ATTENTION)
        assert forward.executed_flops == factor * forward.flops == factor * 4 * 8192**2 * 4096 * 32


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]),
    st.integers(8, 5000),
)
def test_ranks_share_the_work_of_one(tp: int, dp_shard: int, recipe: str, vocab_size: int) -> None:
    """FLOPs of all ranks are those of every token, but for the parameters of norms, which torchtitan counts too."""
    axes = {"recipe": recipe, "output_layer": True, "tp": tp, "dp_shard": dp_shard, "vocab_size": vocab_size}
    case = training(MODELS["debugmodel"], **axes)
    norms = 6 * (2 * case.model.shape.layers + 1) * case.model.shape.dim
    total = sum(entry.flops for rank in range(case.world_size) for entry in work(case, rank=rank))
    assert total == (flops_per_token(case) - norms) * case.train.tokens


@given(TRAINED_DENSE_CASES)
def test_matmuls_in_float8_are_those_that_rules_know(case: Case) -> None:
    """Of all ranks, every shape once."""
    shapes = {
        (gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k)
        for rank in range(case.layout.tp)
        for gemm in gemms(case, rank=rank)
        if gemm.precision == FLOAT8
    }
    assert shapes == {(gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k) for gemm in linears.gemms(case)}


@given(TRAINED_DENSE_CASES)
def test_calls_in_float8_are_those_that_checks_expect_and_that_torch_takes(case: Case) -> None:
    if is_llama(case.target):
        multiplied = executed(case, rank=0).get("matmuls in float8")
        assert (0 if multiplied is None else multiplied.calls) == Expectations(case).scaled_mm_calls[1]
    for gemm in gemms(case):
        if gemm.precision == FLOAT8:
            assert not is_misaligned(case, gemm)
            assert gemm.n % 16 == gemm.executed_k % 16 == 0 and 0 <= gemm.executed_k - gemm.k < 16
        else:
            assert gemm.executed_k == gemm.k


@pytest.mark.parametrize(
    ("schedule", "share"), [("", 1 / 5), ("-gpipe", 1 / 5), ("-interleaved", 1 / 9), ("-zb", 1 / 13)]
)
def test_the_bubble_of_a_schedule(schedule: str, share: float) -> None:
    case = parse_case_id(f"pp2{schedule}-bf16-layers.4-v2048-s3-accum4-f64")
    assert metrics(case, rank=1).bubble == pytest.approx(share)
