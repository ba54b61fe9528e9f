"""What a rank multiplies: matmuls as rules and checks know them, FLOPs by hand and against published speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.expect.fusion import executed_scaled_mm_calls
from harness.expect.work import (
    ATTENTION,
    executed,
    gemms,
    work,
)
from harness.matrix import linears
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.linears import is_misaligned, parameter_count
from harness.matrix.models import MODELS, named_model, training
from harness.plugins.predict.cost import flops_per_token, flops_per_token_by_precision, speed, tokens_per_device
from harness.plugins.predict.machine import PEAKS, peak, peak_of_device
from harness.registry import is_llama
from harness.trace.counts import FLOAT8
from tests.strategies import TRAINED_DENSE_CASES

LLAMA_8B = training(MODELS["llama3-8b"], recipe="tensorwise")
DEBUG = training(MODELS["debugmodel"], recipe="tensorwise", vocab_size=2256)


def in_bf16(case: Case) -> Case:
    return replace(case, float8=Float8())


def test_flops_of_a_token_of_llama_3_8b() -> None:
    assert flops_per_token(LLAMA_8B) == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192
    assert flops_per_token(LLAMA_8B) == 57_914_449_920
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
def test_calls_in_float8_are_those_that_checks_expect(case: Case) -> None:
    if not is_llama(case.target):
        return
    multiplied = executed(case, rank=0).get("matmuls in float8")
    assert (0 if multiplied is None else multiplied.calls) == executed_scaled_mm_calls(case)


@given(TRAINED_DENSE_CASES)
def test_torch_takes_what_is_aligned_and_what_is_padded(case: Case) -> None:
    for gemm in gemms(case):
        if gemm.precision == FLOAT8:
            assert not is_misaligned(case, gemm)
            assert gemm.n % 16 == gemm.executed_k % 16 == 0 and 0 <= gemm.executed_k - gemm.k < 16
        else:
            assert gemm.executed_k == gemm.k
