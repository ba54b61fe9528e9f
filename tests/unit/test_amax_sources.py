"""Whose amax a wrong scale implies: the source is named where one fits, and nothing is said of a right scale."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.casts import (
    CastKey,
    Source,
    as_float32,
    cast_sources,
    casts_by_key,
    earlier_casts,
    implied_by_power,
    implied_source,
    tensorwise_scale,
)
from harness.matrix.recipes import E4M3, E5M2, TRAITS
from harness.trace.operands import CastRecord, OperandTrace
from tests.builders import WQ, make_case, make_cast, make_scale, make_trace

RIGHT = 3.3333
PLACE = (CastKey(3, WQ, "input", "forward"), 0)
FQNS = (WQ, "layers.0.attention.wo")


def recorded(rank: int, source_dtype: str) -> dict[tuple[CastKey, int], CastRecord]:
    """Every rank, step and linear has an amax of its own."""
    casts = [
        make_cast(
            amax=1.0 + rank / 8 + step / 64 + number / 1024,
            largest=0.5 + rank / 8 + step / 64,
            fqn=fqn,
            step=step,
            index=len(FQNS) * step + number,
            placements=("Shard(0)",),
            mesh_axes=("tp",),
            source_dtype=source_dtype,
        )
        for step in (1, 2, 3)
        for number, fqn in enumerate(FQNS)
    ]
    return casts_by_key(make_trace(rank=rank, operands=OperandTrace(casts=tuple(casts), matmuls=())))


def amax(rank: int, step: int, number: int = 0) -> float:
    return 1.0 + rank / 8 + step / 64 + number / 1024


def explained(scale: float, source_dtype: str = "float32") -> str:
    """What is said of this scale of an input on rank 0 in step 3; rank 1 shares it and has its amax."""
    case = make_case(recipe="tensorwise", dp_shard=2, tp=2)
    casts = {rank: recorded(rank, source_dtype) for rank in range(case.world_size)}
    group = {rank: casts[rank][PLACE] for rank in (0, 1)}
    return implied_source(E4M3, scale, amax(1, 3), cast_sources(case, casts, 0, PLACE, group))


def test_an_axis_of_replicas_that_gives_the_same_amax_is_named_beside_the_one_that_is_missing() -> None:
    case = make_case(recipe="tensorwise", dp_replicate=2, dp_shard=2)
    casts = {rank: recorded(rank % 2, "float32") for rank in range(case.world_size)}
    group = {rank: casts[rank][PLACE] for rank in range(4)}
    source, *_ = cast_sources(case, casts, 0, PLACE, group)
    assert source.name == "the amax on rank 0 alone or over dp_replicate, not reduced over dp_shard"


@pytest.mark.parametrize(
    ("used_amax", "whose"),
    [
        (amax(0, 3), "the amax on rank 0 alone, not reduced over tp"),
        (amax(2, 3), "the amax over ranks 0, 2, reduced over dp_shard, not reduced over tp"),
        (amax(3, 3), "the amax over ranks 0-3, reduced over dp_shard"),
        (0.5 + 1 / 8 + 3 / 64, "the largest value without abs"),
        (amax(1, 2), "the amax of step 2"),
        (amax(1, 1), "the amax of step 1"),
        (amax(0, 1), "the amax of step 1 on rank 0 alone"),
        (amax(0, 3, 1), "the amax of input of layers.0.attention.wo"),
    ],
)
def test_the_source_is_named(used_amax: float, whose: str) -> None:
    assert explained(tensorwise_scale(E4M3, used_amax)) == f"it is the scale for {whose}"
    in_float32 = as_float32(as_float32(1 / used_amax) * 448)
    assert explained(in_float32) == f"it is the scale for {whose}"


def test_in_bfloat16_equal_amaxes_may_be_chance_and_one_before_rounding_is_recognized() -> None:
    assert explained(tensorwise_scale(E4M3, amax(0, 3, 1)), "bfloat16") == ""
    assert "step 2" in explained(tensorwise_scale(E4M3, amax(1, 2)), "bfloat16")
    assert implied_source(E4M3, 448 / 3.3301, 3.328125, ()).endswith("bfloat16 rounds to the right one")


def test_an_amax_of_several_steps_names_all_of_them() -> None:
    case, casts = make_case(recipe="tensorwise"), {0: recorded(0, "float32")}
    for step in (1, 2):
        casts[0][PLACE[0]._replace(step=step), 0] = make_cast(amax=0.75)
    sources = list(cast_sources(case, casts, 0, PLACE, {0: casts[0][PLACE]}))
    assert implied_source(E4M3, tensorwise_scale(E4M3, 0.75), amax(0, 3), sources).endswith("the amax of steps 1, 2")


@pytest.mark.parametrize(
    ("dtype", "scale", "words"),
    [
        (E5M2, tensorwise_scale(E4M3, RIGHT), "for the maximum of float8_e4m3fn, 448"),
        (E4M3, tensorwise_scale(E5M2, RIGHT), "for the maximum of float8_e5m2, 57344"),
        (E4M3, 240 / RIGHT, "for the maximum of float8_e4m3fnuz, 240"),
        (E4M3, tensorwise_scale(E4M3, RIGHT) / 2, "the right scale times 2**-1"),
        (E4M3, tensorwise_scale(E4M3, RIGHT) * 4, "the right scale times 2**2"),
        (E4M3, math.nextafter(tensorwise_scale(E4M3, RIGHT), 0) * (1 - 2**-24), "one rounding"),
        (E4M3, 448 / 3.328125, "the amax rounded to bfloat16"),
    ],
)
def test_other_reasons_are_named(dtype: str, scale: float, words: str) -> None:
    assert words in implied_source(dtype, scale, RIGHT, ())


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0, tensorwise_scale(E4M3, RIGHT), 123.456])
def test_nothing_is_said_where_nothing_fits(scale: float) -> None:
    sources = (Source("nothing", math.nan), Source("zero", 0.0), Source("infinity", math.inf), Source("self", RIGHT))
    assert implied_source(E4M3, scale, RIGHT, sources) == ""


@given(st.floats(1e-11, 1e30), st.floats(1e-11, 1e30), st.sampled_from([E4M3, E5M2]))
def test_a_right_scale_has_no_source_and_a_wrong_one_that_fits_has(right: float, other: float, dtype: str) -> None:
    sources = (Source("the other", other),)
    assert implied_source(dtype, tensorwise_scale(dtype, right), right, sources) == ""
    source = implied_source(dtype, tensorwise_scale(dtype, other), right, sources)
    assert "the other" in source or abs(other / right - 1) < 1e-6


def power(value: float, step: int = 3, *, rows: bool = True) -> CastRecord:
    scale = make_scale(value, digest=f"{value}", minimum=value / 4 if rows else value)
    return make_cast(scale=scale, step=step, fqn=WQ)


@pytest.mark.parametrize(
    ("lowest", "highest", "words"),
    [
        (1.03, 1.27, "it is the right scale times 2**1"),
        (0.3, 0.5, "it is the right scale times 2**-1"),
        (0.2, 3.1, ""),
        (math.nan, math.nan, ""),
        (0.0, 0.0, ""),
    ],
)
def test_powers_of_two_that_are_off_alike_are_named(lowest: float, highest: float, words: str) -> None:
    assert implied_by_power(TRAITS["rowwise"], power(8.0), lowest * 448, highest * 448, ()) == words


def test_row_scales_of_an_earlier_step_are_named() -> None:
    earlier = (power(8.0, 1), power(8.0, 2), power(4.0, 2))
    assert implied_by_power(TRAITS["rowwise"], power(8.0), 90, 900, earlier) == "it is the scale of step 2"
    assert implied_by_power(TRAITS["rowwise"], power(2.0), 90, 900, earlier) == ""
    assert implied_by_power(TRAITS["rowwise"], power(8.0, rows=False), 90, 900, earlier) == ""
    casts = {0: recorded(0, "float32")}
    assert [cast.step for cast in earlier_casts(casts, 0, PLACE)] == [1, 2]
