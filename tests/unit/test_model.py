"""The linears of a model that is not known: those of its single-rank reference, called as often as there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.expect.casts import CastSite
from harness.expect.expectations import Expectations
from harness.expect.model import Model, accumulates, found_model, llama_model
from harness.matrix.caseid import parse_case_id
from harness.trace.model import Linear, ModelRecord, Parameter

FQNS = ("up", "down", "lm_head")
CASE = parse_case_id("target.mine-fsdp2-tp2-tensorwise-v2048-f64")


def record(*, calls: int = 1, recomputed: int = 0, axes: tuple[str, ...] = ("tp",)) -> ModelRecord:
    return ModelRecord(
        linears=tuple(Linear(fqn=fqn, in_features=16, out_features=32, converted=True) for fqn in FQNS),
        parameters=tuple(
            Parameter(fqn=f"{fqn}.weight", shape=(32, 16), dtype="float32", local_elements=256, axes=axes, trained=True)
            for fqn in FQNS
        ),
        checkpointed=(),
        compiled=(),
        calls=dict.fromkeys(FQNS, calls),
        recomputed=dict.fromkeys(FQNS, recomputed) if recomputed else {},
    )


def found(text: str = "", *, run: ModelRecord | None = None, **of_reference: int) -> Model:
    return found_model(parse_case_id(text) if text else CASE, record(**of_reference), run or record())


def test_every_linear_is_converted_but_for_the_head_and_what_is_filtered() -> None:
    assert found().converted == ("down", "up")
    assert found("target.mine-single-tensorwise-head.fp8-v2048-f64").converted == ("down", "lm_head", "up")
    assert found("target.mine-single-tensorwise-filter.dow-v2048-f64").converted == ("up",)
    assert found("target.mine-single-bf16-v2048-f64").converted == ()


def test_the_reference_calls_a_linear_for_every_data_parallel_rank() -> None:
    assert found(calls=4).calls == {"up": 2, "down": 2}
    assert found("target.mine-tp2-tensorwise-v2048-f64", calls=4).calls == {"up": 4, "down": 4}


def test_recomputation_and_distribution_are_found_in_the_run() -> None:
    assert set(found(run=record(recomputed=2)).recomputed.values()) == {2}
    assert found(run=record(axes=("dp_shard",))).on_tp == frozenset()
    assert found().on_tp == {"up", "down"}


@pytest.mark.parametrize(
    ("words", "matmuls"), [("tensorwise", (12, 12)), ("tensorwise-ac.full", (16, 16)), ("rowwise-ac.op", (12, 16))]
)
def test_matmuls_follow_from_calls(words: str, matmuls: tuple[int, int]) -> None:
    case = parse_case_id(f"target.mine-single-{words}-v2048-f64")
    again = 2 if "ac" in words else 0
    expect = Expectations(case, found_model(case, record(calls=2), record(recomputed=again)))
    assert expect.scaled_mm_calls == matmuls


def test_casts_follow_from_calls() -> None:
    case = parse_case_id("target.mine-tp2-tensorwise-ac.full-v2048-f64")
    casts = Expectations(case, found_model(case, record(calls=2), record(recomputed=2))).casts
    times = {(site.role, site.phase): len(forms) for site, forms in casts.items() if site.fqn == "up"}
    assert times == {
        ("input", "forward"): 2,
        ("input", "recompute"): 2,
        ("input", "backward"): 2,
        ("weight", "forward"): 2,
        ("weight", "recompute"): 2,
        ("weight", "backward"): 2,
        ("grad_output", "backward"): 4,
    }
    assert CastSite("lm_head", "input", "forward") not in casts


def test_before_the_reference_has_run_nothing_is_expected_of_linears() -> None:
    expect = Expectations(CASE)
    assert {"fp8_on", "matmuls", "scales", "recompute", "traffic"} <= expect.not_judged.keys()
    assert {"memory", "live_memory"} <= Expectations(CASE, found()).not_judged.keys()
    assert "scales" not in Expectations(CASE, found()).not_judged


def test_of_a_llama_all_follows_from_the_case() -> None:
    case = parse_case_id("tp2-tensorwise-ac.full-v2048-f64")
    model = llama_model(case)
    assert set(model.calls.values()) == set(model.recomputed.values()) == {1}
    assert Expectations(replace(case, target="torchtitan")).model == model


def test_ranks_accumulate_where_a_linear_is_not_called_once() -> None:
    """Calls of compiled blocks are not counted: they may."""
    text = "target.mine-fsdp2-tensorwise-v2048-f32"
    fsdp = parse_case_id(text)
    assert [accumulates(fsdp, found(text, calls=calls)) for calls in (2, 4, 0)] == [False, True, True]
    assert not accumulates(parse_case_id("target.mine-tp2-tensorwise-v2048-f32"), found(calls=4))
    assert not accumulates(parse_case_id("fsdp2-tensorwise-v2048-f32"), found(calls=4))
    assert not accumulates(fsdp, None)
