"""What must hold for predictions whatever the rates are, and how far they are from published speeds."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.expect.work import gemms
from harness.matrix.axes import case_from_axes
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.dims.dimension import Transfer
from harness.matrix.models import MODELS, training
from harness.plugins.predict.gains import ERROR_ELSEWHERE, ERROR_H100, conversions
from harness.plugins.predict.machine import PEAKS, Machine, Rates, axis_bytes_s, machine, transfer_s
from harness.plugins.predict.roofline import casts, matmul_s, predicted_step, speed_up
from harness.trace.counts import FLOAT8
from tests.plugins.predict.unit.published import GRAND_TETON, LINEARS, Published, PublishedLinear, published

H100 = machine("h100")
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
SMALL = st.builds(
    lambda recipe, layout, compile, checkpointing: case_from_axes(
        {"recipe": recipe, "compile": compile, "checkpointing": checkpointing, "dtype": "bfloat16", **layout}
    ),
    st.sampled_from(RECIPES),
    st.sampled_from([{}, {"tp": 2}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 4}]),
    st.sampled_from(["none", "inductor"]),
    st.sampled_from(["none", "full", "selective_op"]),
)


def block(dim: int, recipe: str = "tensorwise", **axes: object) -> Case:
    """One wide block of this dim."""
    sizes = {"dim": dim, "layers": 1, "heads": 8, "kv_heads": 8, "ffn_dim": 4 * dim, "vocab_size": 2048}
    given = {"dtype": "bfloat16", "compile": "inductor", "seq_len": 4096, "global_batch": 2, "recipe": recipe}
    return case_from_axes({**sizes, **given, **axes})


@given(SMALL, st.floats(1, 10), st.sampled_from(["memory_tb_s", "link_gb_s", "bfloat16", "float8"]))
def test_a_better_device_is_never_slower(case: Case, factor: float, field: str) -> None:
    peak = replace(H100.peak, **{field: getattr(H100.peak, field) * factor})
    before, after = (predicted_step(case, on).total_s for on in (H100, replace(H100, peak=peak)))
    assert after <= before * (1 + 1e-12)


@given(st.integers(1, 64), st.integers(1, 8), st.floats(1, 10))
def test_a_better_network_is_never_slower(dp_shard: int, tp: int, factor: float) -> None:
    case = case_from_axes({"dp_shard": dp_shard, "tp": tp, "dtype": "bfloat16", "global_batch": dp_shard})
    before = predicted_step(case, H100).total_s
    assert predicted_step(case, replace(H100, network_gb_s=50 * factor)).total_s <= before * (1 + 1e-12)


@given(st.integers(1, 40), st.sampled_from(RECIPES))
def test_padding_costs_nothing_where_all_is_aligned(sixteens: int, recipe: str) -> None:
    case = block(256, recipe, seq_len=16 * sixteens, pad_inner_dim=True)
    unpadded = replace(case, float8=replace(case.float8, pad_inner_dim=False))
    assert predicted_step(case, H100) == predicted_step(unpadded, H100)


def test_muon_keeps_one_state_of_the_matrices_of_blocks() -> None:
    adamw, muon = (predicted_step(block(256, optimizer=name), H100).memory_s for name in ("adamw", "muon"))
    matrices = (4 + 3 * 4) * 256 * 256  # read and written in float32
    assert math.isclose(adamw - muon, 2 * matrices * 4 / H100.memory_bytes_s, rel_tol=1e-6)


def test_padding_costs_where_tokens_are_unaligned() -> None:
    case = block(256, seq_len=4100, global_batch=1, pad_inner_dim=True)
    padded = {(gemm.role, bool(gemm.padding_bytes)) for gemm in gemms(case) if gemm.precision == "float8"}
    assert padded == {("forward", False), ("dgrad", False), ("wgrad", True)}
    assert {gemm.executed_k for gemm in gemms(case) if gemm.role == "wgrad" and gemm.copied} == {4112}


def test_eager_padding_copies_aligned_operands_too() -> None:
    """`torch.nn.functional.pad` by nothing returns a copy."""
    case = training(MODELS["llama3-8b"], recipe="tensorwise", pad_inner_dim=True)
    float8 = [gemm for gemm in gemms(case) if gemm.precision == "float8"]
    assert all(gemm.executed_k == gemm.k for gemm in float8)
    ideal_s = sum(gemm.executed_flops for gemm in float8) / 1979e12 / 0.78
    slower = replace(H100, peak=replace(H100.peak, memory_tb_s=2.4))
    assert predicted_step(case, slower).padding_s / ideal_s == pytest.approx(0.23, abs=0.05)


@given(st.sampled_from(RECIPES[1:]), st.integers(16, 400), st.integers(2, 8))
def test_gain_shrinks_with_the_linears(recipe: str, sixteens: int, times: int) -> None:
    small, large = (conversions(block(16 * size, recipe), H100) for size in (sixteens, sixteens * times))
    assert all(one.gain <= other.gain + 1e-12 for one, other in zip(small, large, strict=True))


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_small_linears_lose_and_large_ones_gain(recipe: str) -> None:
    small, large = (conversions(block(dim, recipe), H100) for dim in (256, 8192))
    assert small[0].gain < 1 < min(conversion.gain for conversion in large)


def test_a_plain_layout_pays_nothing_for_wires() -> None:
    step = predicted_step(block(1024), H100)
    assert step.tensor_parallel_s == step.data_parallel_s == step.dispatch_s == 0


def test_tensor_parallelism_divides_matmuls_and_not_casts_of_gathered_activations() -> None:
    alone, sharded = (training(MODELS["llama3-8b"], recipe="rowwise", tp=tp, compile="inductor") for tp in (1, 8))
    flops = [sum(gemm.flops for gemm in gemms(case)) for case in (alone, sharded)]
    moved = [sum(cast.column_bytes for cast in casts(case)) for case in (alone, sharded)]
    assert flops[0] == 8 * flops[1]
    assert moved[0] < 3 * moved[1]


def test_eager_small_models_wait_for_their_dispatch() -> None:
    eager = training(MODELS["debugmodel"], recipe="tensorwise", tokens=16384)
    step = predicted_step(eager, H100)
    assert step.total_s == step.dispatch_s > step.device_s
    assert speed_up(eager, H100) < 0.85


def test_float8_all_gather_pays_between_nodes_and_not_within() -> None:
    def gain(dp_shard: int, tp: int) -> float:
        axes = {"recipe": "tensorwise", "compile": "inductor", "dp_shard": dp_shard, "tp": tp}
        gathering = {"fp8_all_gather": True, "precompute_scale": True}
        model = MODELS["llama3-8b"]
        plain, narrow = training(model, tokens=8192, **axes), training(model, tokens=8192, **axes, **gathering)
        return predicted_step(plain, H100).total_s / predicted_step(narrow, H100).total_s

    assert 1 <= gain(8, 1) < 1.08
    assert gain(64, 8) > 1.1


def test_groups_between_nodes_share_the_network_of_their_devices() -> None:
    assert axis_bytes_s(Layout(tp=8, dp_shard=64), "tp", H100) == H100.link_bytes_s
    assert axis_bytes_s(Layout(tp=8, dp_shard=64), "dp_shard", H100) == H100.network_bytes_s
    assert axis_bytes_s(Layout(tp=2, dp_shard=64), "dp_shard", H100) == 4 * H100.network_bytes_s
    assert axis_bytes_s(Layout(tp=2, dp_shard=4), "dp_shard", H100) == H100.link_bytes_s
    assert axis_bytes_s(Layout(tp=16), "tp", H100) == min(H100.link_bytes_s, 8 * H100.network_bytes_s)


@pytest.mark.parametrize(("kind", "sent"), [("all_gather", 3.0), ("reduce_scatter", 0.75), ("all_reduce", 1.5)])
def test_rings_send_all_but_what_a_rank_has(kind: str, sent: float) -> None:
    transfer = Transfer(axis="tp", kind=kind, dtype="bfloat16", elements=10**9, purpose="")
    expected = sent * 2e9 / H100.link_bytes_s + 20e-6
    assert transfer_s(transfer, Layout(tp=4), H100) == pytest.approx(expected)


def test_device_without_float8() -> None:
    with pytest.raises(HarnessError, match="a100 has no float8 matmuls") as error:
        machine("a100")
    assert error.value.fix is not None and "a100" not in error.value.fix and "h100" in error.value.fix


@pytest.mark.parametrize("device", [device.name for device in PEAKS if device.float8])
def test_every_device_with_float8_is_predicted(device: str) -> None:
    assert predicted_step(block(1024), Machine(peak=machine(device).peak)).total_s > 0


ROWS = {f"{row.name} {row.ratio:.3f}": row for row in published()}
ON_H100 = {name: row for name, row in ROWS.items() if row.machine == GRAND_TETON}
COMPILED = {name: row for name, row in ON_H100.items() if row.case.compile != "none"}


@functools.cache
def times(name: str) -> tuple[float, float]:
    """Predicted seconds of a step in BF16 and in FP8."""
    row = ROWS[name]
    twin = predicted_step(replace(row.case, float8=Float8()), row.machine)
    return twin.total_s, predicted_step(row.case, row.machine).total_s


def ratio(name: str) -> float:
    bf16, float8 = times(name)
    return bf16 / float8


@pytest.mark.parametrize("name", ROWS)
def test_speed_up(name: str) -> None:
    row = ROWS[name]
    assert ratio(name) == pytest.approx(row.ratio, rel=ERROR_H100 if name in ON_H100 else ERROR_ELSEWHERE)
    assert (ratio(name) > 1) == (row.ratio > 1)


@pytest.mark.parametrize("name", [name for name, row in ON_H100.items() if row.fitted])
def test_tokens_a_second_in_bf16(name: str) -> None:
    row = ROWS[name]
    assert row.bf16_tokens_s is not None
    tokens_s = row.case.train.tokens / row.case.world_size / times(name)[0]
    assert tokens_s == pytest.approx(row.bf16_tokens_s, rel=0.1)


def test_float8_all_gather_is_about_a_fifth_of_the_combined_gain() -> None:
    """20 % of it for 70B on 128 H100, as its authors say."""
    row = next(row for row in ROWS.values() if row.name == "70B, FSDP 128")
    gathering = replace(row.case.float8, fp8_all_gather=False, precompute_scale=False)
    alone, together = (
        speed_up(replace(row.case, float8=float8), row.machine) for float8 in (gathering, row.case.float8)
    )
    assert (together - alone) / (together - 1) == pytest.approx(0.20, abs=0.05)


def test_the_page_has_the_number_of_rows_and_their_largest_errors() -> None:
    page = (Path(__file__).parents[4] / "docs" / "plugins" / "predict.md").read_text()
    assert all(text in page for text in (f" {len(ROWS)} published ", f"{ERROR_H100:.0%}", f"{ERROR_ELSEWHERE:.0%}"))


def linear_ms(linear: PublishedLinear, precision: str, *, cast_bytes: int, machine: Machine = GRAND_TETON) -> float:
    """Forward, dgrad and wgrad, and casts that move so many bytes of every element of an operand."""
    m, n, k = linear.m, linear.n, linear.k
    matmuls = sum(matmul_s(*sizes, precision, machine) for sizes in ((m, n, k), (m, k, n), (n, k, m)))
    return (matmuls + (m * k + n * k + m * n) * cast_bytes / machine.memory_bytes_s) * 1e3


def test_single_linears() -> None:
    """In this benchmark the casts of both axes move 8 bytes of an element: no kernel is slow that writes transposed."""
    for linear in LINEARS:
        assert linear_ms(linear, "bfloat16", cast_bytes=0) == pytest.approx(linear.bf16_ms, rel=0.03)
        assert linear_ms(linear, FLOAT8, cast_bytes=8) == pytest.approx(linear.float8_ms, rel=0.15)


@functools.cache
def cast_seconds(name: str) -> tuple[float, float]:
    """Of transposed and of column casts at full bandwidth."""
    row = ROWS[name]
    all_casts, rate = casts(row.case), row.machine.memory_bytes_s
    return sum(cast.transposed_bytes for cast in all_casts) / rate, sum(cast.column_bytes for cast in all_casts) / rate


def error(name: str, transposing: float, columns: float) -> float:
    """Of the logarithm of the speed-up with these rates."""
    bf16, float8 = times(name)
    used = Rates()
    transposed, column = cast_seconds(name)
    float8 += transposed * (1 / transposing - 1 / used.transposing) + column * (1 / columns - 1 / used.columns)
    return math.log(bf16 / float8 / ROWS[name].ratio)


GRID = list(itertools.product([0.25, 0.3, 0.4, 0.5, 0.7, 1.0], [0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0]))


def fit(names: list[str]) -> tuple[float, float]:
    return min(GRID, key=lambda rates: sum(error(name, *rates) ** 2 for name in names))


def is_a_fitted(row: Published) -> bool:
    return row.fitted and row.case.compile != "none"


@pytest.mark.parametrize("left_out", [name for name, row in ON_H100.items() if is_a_fitted(row)])
def test_rates_of_casts_without_a_row_predict_it(left_out: str) -> None:
    names = [name for name, row in COMPILED.items() if is_a_fitted(row)]
    rates = fit([name for name in names if name != left_out])
    assert abs(error(left_out, *rates)) < 0.08
    assert fit(names) == (Rates().transposing, Rates().columns)


def test_columns_are_slow_because_rows_say_so() -> None:
    """At the bandwidth of other kernels rowwise scaling would be predicted too fast under tensor parallelism."""
    name = next(name for name in ROWS if name.startswith("8B, FSDP 8 x TP 8, rowwise"))
    assert error(name, Rates().transposing, 1.0) > 0.15
