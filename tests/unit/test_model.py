"""What one step of the model does, by formula: calls, casts, recomputation, and what only the reference model has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.expect.expectations import Expectations
from harness.expect.model import CastSite, Model, accumulates, found_model, llama_model, recomputed_calls
from harness.matrix.case import Checkpointing, CheckpointMode
from harness.matrix.caseid import parse_case_id
from harness.trace.model import Linear, ModelRecord
from tests.builders import make_case, make_cast, make_model, make_parameter, not_judged

FQNS = ("up", "down", "lm_head")
CASE = parse_case_id("target.mine-fsdp2-tp2-tensorwise-v2048-f64")


def record(*, calls: int = 1, recomputed: int = 0, axes: tuple[str, ...] = ("tp",)) -> ModelRecord:
    return make_model(
        *(make_parameter(f"{fqn}.weight", shape=(32, 16), local_elements=256, axes=axes) for fqn in FQNS),
        linears=tuple(Linear(fqn=fqn, in_features=16, out_features=32, converted=True) for fqn in FQNS),
        calls=dict.fromkeys(FQNS, calls),
        recomputed=dict.fromkeys(FQNS, recomputed) if recomputed else {},
    )


def model_of(text: str = "", *, run: ModelRecord | None = None, **of_reference: int) -> Model:
    return found_model(parse_case_id(text) if text else CASE, record(**of_reference), run or record())


def test_conversion_calls_recomputation_and_distribution_are_found() -> None:
    assert model_of().converted == ("down", "up")
    assert model_of("target.mine-single-tensorwise-head.fp8-v2048-f64").converted == ("down", "lm_head", "up")
    assert model_of("target.mine-single-tensorwise-filter.dow-v2048-f64").converted == ("up",)
    assert model_of("target.mine-single-bf16-v2048-f64").converted == ()
    assert model_of(calls=4).calls == {"up": 2, "down": 2}
    assert model_of("target.mine-tp2-tensorwise-v2048-f64", calls=4).calls == {"up": 4, "down": 4}
    assert set(model_of(run=record(recomputed=2)).recomputed.values()) == {2}
    assert model_of(run=record(axes=("dp_shard",))).on_tp == frozenset()
    assert model_of().on_tp == {"up", "down"}


def test_which_module_casts_is_found_in_the_run() -> None:
    """A linear casts its own input, or a module above it does; one with a float8 TP style does not cast it again."""
    case = parse_case_id("target.mine-tp2-tensorwise-tpstyle.fp8-v2048-f64")
    linears = tuple(Linear(fqn=fqn, in_features=16, out_features=32, converted=True) for fqn in ("a.q", "a.k", "b.up"))
    reference = replace(record(), linears=linears, calls={linear.fqn: 1 for linear in linears})
    sites = (("a", "forward"), ("b.up", "forward"), ("b.up", "backward"))
    casts = [make_cast(fqn=fqn, phase=phase, role="input") for fqn, phase in sites]
    model = found_model(case, reference, reference, casts)
    assert model.input_sites == {"a.k": "a", "a.q": "a", "b.up": "b.up"}
    assert model.styled == {"a.k", "a.q"}
    times = {(site.fqn, site.role): len(forms) for site, forms in Expectations(case, model).casts.items()}
    assert times["a", "input"] == times["a.q", "grad_output"] == 1
    assert times["b.up", "grad_output"] == 2


def test_a_weight_that_an_embedding_has_as_well_is_not_gathered_in_float8() -> None:
    case = parse_case_id("target.mine-fsdp2-tensorwise-ag.fp8-head.fp8-v2048-f64")
    linears = tuple(replace(linear, tied=linear.fqn == "lm_head") for linear in record().linears)
    model = found_model(case, replace(record(calls=2), linears=linears), record())
    assert model.gathered == {"down", "up"}
    casts = Expectations(case, model).casts
    phases = {site.phase for site in casts if (site.fqn, site.role) == ("lm_head", "weight")}
    assert phases == {"forward", "backward"}


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


def test_before_the_reference_has_run_nothing_is_expected_of_linears_but_of_a_llama() -> None:
    assert {"fp8_on", "matmuls", "scales", "recompute", "traffic"} <= not_judged(CASE).keys()
    assert {"memory", "live_memory"} <= not_judged(Expectations(CASE, model_of())).keys()
    assert "scales" not in not_judged(Expectations(CASE, model_of()))
    case = parse_case_id("tp2-tensorwise-ac.full-v2048-f64")
    model = llama_model(case)
    assert set(model.calls.values()) == set(model.recomputed.values()) == {1}


@pytest.mark.plugin("torchtitan")
def test_the_model_of_torchtitan_is_a_llama() -> None:
    case = parse_case_id("tp2-tensorwise-ac.full-v2048-f64")
    assert Expectations(replace(case, target="torchtitan")).model == llama_model(case)


def test_ranks_accumulate_where_a_linear_is_not_called_once() -> None:
    """Calls of compiled blocks are not counted: they may."""
    text = "target.mine-fsdp2-tensorwise-v2048-f32"
    fsdp = parse_case_id(text)
    assert [accumulates(fsdp, model_of(text, calls=calls)) for calls in (2, 4, 0)] == [False, True, True]
    assert not accumulates(parse_case_id("target.mine-tp2-tensorwise-v2048-f32"), model_of(calls=4))
    assert not accumulates(parse_case_id("fsdp2-tensorwise-v2048-f32"), model_of(calls=4))
    assert not accumulates(fsdp, None)


LAYERS = range(6)


@pytest.mark.parametrize(
    ("mode", "every", "wrapped"),
    [
        ("none", 2, []),
        ("full", 2, [0, 1, 2, 3, 4, 5]),
        ("selective_op", 2, [0, 1, 2, 3, 4, 5]),
        ("selective_layer", 1, [0, 1, 2, 3, 4, 5]),
        ("selective_layer", 2, [1, 3, 5]),
        ("selective_layer", 3, [2, 5]),
        ("selective_layer", 6, [5]),
        ("selective_layer", 7, []),
    ],
)
def test_which_blocks_are_wrapped(mode: CheckpointMode, every: int, wrapped: list[int]) -> None:
    assert [layer for layer in LAYERS if Checkpointing(mode=mode, every=every).wraps(layer)] == wrapped


@given(st.integers(1, 40), st.integers(1, 10))
def test_one_block_of_every_n_is_wrapped(layers: int, every: int) -> None:
    checkpointing = Checkpointing(mode="selective_layer", every=every)
    assert sum(map(checkpointing.wraps, range(layers))) == layers // every


MODES = ["none", "full", "selective_op", "selective_layer"]


@pytest.mark.parametrize("mode", MODES)
def test_matmuls_are_recomputed_where_blocks_are_wrapped(mode: CheckpointMode) -> None:
    case = make_case(recipe="tensorwise", checkpointing=mode, layers=1)
    assert (recomputed_calls(case, llama_model(case)) > 0) is case.checkpointing.wraps(0)
