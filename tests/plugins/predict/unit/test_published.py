"""Predictions against what others measured: every row, and every fitted rate without the rows that it was fitted to."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.matrix.case import Float8
from harness.plugins.predict.gains import ERROR_ELSEWHERE, ERROR_H100
from harness.plugins.predict.machine import Machine, Rates
from harness.plugins.predict.roofline import casts, matmul_s, predicted_step, speed_up
from harness.trace.counts import FLOAT8
from tests.published import GRAND_TETON, LINEARS, Published, PublishedLinear, published

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


@pytest.mark.parametrize("name", ON_H100)
def test_speed_up_on_h100(name: str) -> None:
    row = ON_H100[name]
    assert ratio(name) == pytest.approx(row.ratio, rel=ERROR_H100)
    assert (ratio(name) > 1) == (row.ratio > 1)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ON_H100])
def test_speed_up_on_other_devices(name: str) -> None:
    assert ratio(name) == pytest.approx(ROWS[name].ratio, rel=ERROR_ELSEWHERE)
    assert ratio(name) > 1


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


def test_the_page_has_every_row() -> None:
    page = (Path(__file__).parents[4] / "docs" / "plugins" / "predict.md").read_text()
    for name, row in ROWS.items():
        error = f"{ratio(name) / row.ratio - 1:+.1%}"
        kind = "fitted" if row.fitted else ""
        assert f"| {row.name} | {row.ratio:.3f} | {ratio(name):.3f} | {error} | {kind} |\n" in page


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
