"""Rules, recipes and shape arithmetic: what is excluded, what must be refused, what is cast, and how many matmuls."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.model import llama_model, recomputed_calls
from harness.matrix.axes import AXES, axis_values, case_from_axes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.linears import converted_fqns, gemms, is_misaligned, shard_sizes
from harness.matrix.recipes import E4M3, E5M2, FLOAT8_MAX, OPERANDS, TRAITS, Recipe
from harness.matrix.rules import EXCLUSIONS, REFUSALS, Rule, exclusions, expected_refusal, explain
from tests.builders import make_case
from tests.strategies import POSSIBLE_CASES

RULES: tuple[Rule, ...] = (*EXCLUSIONS, *REFUSALS)


def excluded_by(**axes: object) -> set[str]:
    return {rule.name for rule in exclusions(case_from_axes(axes))}


def refused_by(text: str) -> str | None:
    refusal = expected_refusal(parse_case_id(text))
    return refusal.name if refusal else None


@given(st.from_type(Case), st.from_type(Case))
def test_rules_read_only_the_axes_they_name(case: Case, other: Case) -> None:
    values, others = axis_values(case), axis_values(other)
    for rule in RULES:
        try:
            grafted = case_from_axes({name: (values if name in rule.axes else others)[name] for name in AXES})
        except HarnessError:
            continue
        kept = axis_values(grafted)
        if all(kept[name] == values[name] for name in rule.axes):
            assert rule.applies(grafted) == rule.applies(case), rule.name


def test_rules_have_different_names_reasons_and_sources() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.reason
        assert rule.source
        assert set(rule.axes) <= set(AXES)


TESTS = Path(__file__).parents[1]
FILES = [TESTS / "unit" / "excluded.toml", *sorted(TESTS.glob("plugins/*/unit/excluded.toml"))]
EXAMPLES = {name: cases for file in FILES for name, cases in tomllib.loads(file.read_text()).items()}


def test_torchtitan_shards_no_sequence_where_none_is_asked_for_and_filters_keys_with_values() -> None:
    assert not excluded_by(target="torchtitan", tp=2, sequence_parallel=False)
    assert not excluded_by(target="torchtitan", recipe="rowwise", filter_fqns=["wk", "wv"])
    assert not excluded_by(recipe="rowwise", filter_fqns=["wk"])


def test_rules_of_shapes_say_nothing_of_a_model_that_is_not_known() -> None:
    axes: dict[str, object] = {"tp": 3, "recipe": "rowwise", "filter_fqns": ["w9"]}
    assert excluded_by(**axes)
    assert not excluded_by(target="mine", **axes)
    assert "async_tp_needs_tp" in excluded_by(target="mine", async_tp=True, compile="graph")


@pytest.mark.plugin("torchtitan")
def test_every_exclusion_has_an_example_that_it_excludes() -> None:
    assert [(name, axes) for name in EXAMPLES for axes in EXAMPLES[name] if name not in excluded_by(**axes)] == []
    assert EXAMPLES.keys() == {rule.name for rule in EXCLUSIONS}, "each has an example in `excluded.toml`"


@pytest.mark.parametrize(
    "text",
    [
        "single-tensorwise-v2048-f32",
        "tp8-bf16-v2050-f32",
        "fsdp2-tensorwise-ag.fp8pre-v2048-f32",
        "hsdp2x2-tp2-tensorwise-ag.fp8-tpstyle.fp8-head.fp8-pad-ac.full-v2048-b16",
        "tp4-nosp-nolp-rowwise-filter.wq-v2048-sl30-f32",
        "single-bf16-graph-v2048-f32",
        "atp2-rowwise-inductor-v2048-f32",
    ],
)
def test_sound_cases_are_not_excluded(text: str) -> None:
    assert exclusions(parse_case_id(text)) == ()


# Every line agrees with torchao 0.18 on torch 2.13, called with these shapes on the meta device.
@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("tp2-tensorwise-head.fp8-v2256-f32", "output_alignment"),
        ("tp4-tensorwise-head.fp8-v2256-f32", "output_alignment"),
        ("tp8-rowwise-head.fp8-v2256-f32", "output_alignment"),
        ("tp2-tensorwise-head.fp8-pad-v2256-f32", "output_alignment"),
        ("tp8-tensorwise-head.fp8-pad-v2256-f32", "output_alignment"),
        ("single-tensorwise-head.fp8-v2256-f32", None),
        ("fsdp8-tensorwise-head.fp8-v2256-f32", None),
        ("tp8-tensorwise-v2256-f32", None),
        ("tp8-tensorwise-head.fp8-v2560-f32", None),
        ("tp8-tensorwise-head.fp8-v2256-vpad128-f32", None),
        ("tp8-tensorwise-head.fp8-v2256-vpad64-f32", None),
        ("tp8-tensorwise-head.fp8-v2256-vpad20-f32", "output_alignment"),
        ("tp8-bf16-v2256-f32", None),
        ("tp4-tensorwise-head.fp8-v2114-f32", "output_alignment"),
        ("fsdp8-tensorwise-v2048-sl40-f32", "token_alignment"),
        ("fsdp8-rowwise-v2048-sl40-f32", "token_alignment"),
        ("fsdp8-tensorwise-pad-v2048-sl40-f32", None),
        ("fsdp8-rowwise_with_gw_hp-v2048-sl40-f32", None),
        ("tp8-rowwise-ffn.320-v2048-f32", "block_alignment"),
        ("tp8-rowwise-filter.w1+w2+w3-ffn.320-v2048-f32", None),
        ("tp8-tensorwise-pad-ffn.320-v2048-f32", "block_alignment"),
        # Verified on the virtual device, where torchao's own assertions refuse.
        ("single-mxfp8-head.fp8-v2256-b16", "output_alignment"),
        ("single-mxfp8-head.fp8-v2256-vpad32-b16", None),
        ("fsdp8-mxfp8-v2048-sl40-b16", "token_alignment"),
        ("fsdp8-mxfp8_with_gw_hp-v2048-sl40-b16", None),
        ("single-mxfp8_floor-ffn.304-v2048-b16", "block_alignment"),
    ],
)
def test_the_alignment_contract(text: str, refusal: str | None) -> None:
    assert refused_by(text) == refusal


@given(POSSIBLE_CASES)
def test_a_refusal_is_exactly_a_misaligned_matmul(case: Case) -> None:
    explanation = explain(case)
    assert (explanation.refusal is not None) == any(is_misaligned(case, gemm) for gemm in gemms(case))
    assert bool(explanation.refused_gemms) == (explanation.refusal is not None)


def test_the_first_refused_matmul_is_named() -> None:
    first = explain(parse_case_id("tp2-tensorwise-head.fp8-v2256-f32")).refused_gemms[0]
    assert (first.fqn, first.role, first.m, first.k, first.n) == ("output", "forward", 256, 128, 1128)


@pytest.mark.parametrize(
    "message",
    [
        "Expected self.size(1) to be divisible by 16, but got self.size(1)=40",
        "Expected both dimensions of mat2 to be divisible by 16 but got torch.Size([128, 1128])",
        "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (128x40).",
        "mat2 shape (128x1128) must be divisible by 16",
        "columns must be divisible by inner block size",
        "rows must be a multiple of 32",
        "cols must be a multiple of 32",
    ],
)
def test_refusals_know_the_messages_of_torch_and_torchao(message: str) -> None:
    assert all(re.search(rule.pattern, f"RuntimeError: {message}") for rule in REFUSALS)
    assert not any(re.search(rule.pattern, "RuntimeError: CUDA out of memory") for rule in REFUSALS)


def test_converted_linears() -> None:
    assert converted_fqns(Case()) == ()
    assert len(converted_fqns(parse_case_id("single-rowwise-v2048-f32"))) == 14
    fqns = converted_fqns(parse_case_id("single-rowwise-head.fp8-filter.layers.0+wk-v2048-f32"))
    assert "output" in fqns
    assert list(fqns) == sorted(fqns)
    assert len(fqns) == 7
    assert not any("wk" in fqn or "layers.0" in fqn for fqn in fqns)


# Counted with torchao 0.18 and torchtitan's checkpointing on two blocks of seven linears.
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("single-bf16-ac.full-v2048-f32", 0),
        ("single-tensorwise-v2048-f32", 42),
        ("single-tensorwise-head.fp8-v2048-f32", 45),
        ("tp2-rowwise-ac.full-v2048-f32", 56),
        ("tp2-rowwise-ac.op-v2048-f32", 48),
        ("single-rowwise_with_gw_hp-v2048-f32", 28),
        ("single-rowwise_with_gw_hp-ac.full-v2048-f32", 42),
        ("single-rowwise_with_gw_hp-ac.op-v2048-f32", 34),
        ("single-tensorwise-ac.layer2-v2048-f32", 49),
        ("single-tensorwise-ac.layer1-v2048-f32", 56),
        ("single-tensorwise-filter.wq-ac.op-v2048-f32", 42),
        ("single-tensorwise-filter.wk-ac.op-v2048-f32", 40),
        ("single-tensorwise-filter.w2-ac.op-v2048-f32", 42),
        ("single-tensorwise-filter.wk+wo-ac.op-v2048-f32", 32),
        ("single-tensorwise-filter.wk-ac.full-v2048-f32", 48),
    ],
)
def test_scaled_matmuls_of_a_step(text: str, calls: int) -> None:
    assert Expectations(parse_case_id(text)).scaled_mm_calls == (calls, calls)


@given(st.from_type(Case) | POSSIBLE_CASES)
def test_matmuls_and_calls_agree(case: Case) -> None:
    even = case_from_axes(axis_values(case) | {"tp": 1, "target": "reference"})
    evaluated = sum(gemm.role == "forward" for gemm in gemms(even)) if even.train.evaluate else 0
    of_microbatch = evaluated + len(gemms(even))
    calls = even.train.accumulation * of_microbatch + recomputed_calls(even, llama_model(even))
    assert Expectations(even, llama_model(even)).scaled_mm_calls == (calls, calls)


@given(st.integers(1, 1000), st.integers(1, 16))
def test_shards_add_up(total: int, ranks: int) -> None:
    sizes = shard_sizes(total, ranks)
    assert sum(sizes) == total
    assert len(sizes) == ranks
    assert list(sizes) == sorted(sizes, reverse=True)


MXFP8 = {"mxfp8", "mxfp8_floor", "mxfp8_with_gw_hp"}
FP8 = [recipe for recipe, traits in TRAITS.items() if traits.converts]


def recipes_that(name: str) -> set[str]:
    """The recipes of which a fact is true."""
    return {recipe for recipe, traits in TRAITS.items() if getattr(traits, name)}


def test_every_recipe_has_its_facts() -> None:
    assert set(TRAITS) == set(get_args(Recipe))


# Read off `Float8LinearConfig.from_recipe_name`, `Float8Linear`, `mx_mm` and `fp8_blockwise_mm` of torchao 0.18.
@pytest.mark.parametrize(
    ("fact", "recipes"),
    [
        ("converts", {"tensorwise", "rowwise", "rowwise_with_gw_hp", *MXFP8, "blockwise"}),
        ("block", {*MXFP8, "blockwise"}),
        ("rounds_scales_down", {"mxfp8_floor"}),
        ("one_scale_per_tensor", {"tensorwise"}),
        ("power_of_two_scales", {"rowwise", "rowwise_with_gw_hp", *MXFP8}),
        ("writes_bfloat16", {"rowwise", "rowwise_with_gw_hp", *MXFP8, "blockwise"}),
        ("gathers_weights_in_float8", {"tensorwise"}),
        ("has_tp_styles", {"tensorwise"}),
    ],
)
def test_a_fact_is_true_of_its_recipes_alone(fact: str, recipes: set[str]) -> None:
    assert recipes_that(fact) == recipes


@pytest.mark.parametrize(
    ("recipe", "casts", "float8", "rows"),
    [
        ("bf16", [], set(), set()),
        ("tensorwise", [], {"forward", "dgrad", "wgrad"}, set()),
        ("rowwise", [], {"forward", "dgrad", "wgrad"}, {"forward", "dgrad", "wgrad"}),
        ("rowwise_with_gw_hp", [], {"forward", "dgrad"}, {"forward", "dgrad"}),
        ("mxfp8", [], {"forward", "dgrad", "wgrad"}, set()),
        ("mxfp8_with_gw_hp", [], {"forward", "dgrad"}, set()),
        ("blockwise", [], {"forward", "dgrad", "wgrad"}, set()),
        ("tensorwise", ["go_gw:dis", "i_gw:dis"], {"forward", "dgrad"}, set()),
        ("rowwise", ["i:ten", "w:ten", "w_gi:ten"], {"forward", "dgrad", "wgrad"}, {"dgrad", "wgrad"}),
    ],
)
def test_which_matmuls_are_float8_and_scale_rows(
    recipe: str, casts: list[str], float8: set[str], rows: set[str]
) -> None:
    traits = make_case(recipe=recipe, casts=casts).float8.traits
    assert {matmul for matmul in OPERANDS if traits.multiplies(matmul)} == float8
    assert {matmul for matmul in OPERANDS if traits.scales_rows(matmul)} == rows


def test_casts_that_the_recipe_has_anyway_have_no_spelling_and_none_is_set_twice() -> None:
    assert make_case(recipe="rowwise", casts=["w:axs", "go:e4m3", "i:ten"]).float8.casts == ("i:ten",)
    assert case_id(make_case(recipe="tensorwise", casts=["go:e4m3", "i:ten"])).startswith(
        "single-tensorwise-casts.go.e4m3-v"
    )
    with pytest.raises(HarnessError, match="set an operand twice"):
        make_case(recipe="rowwise", casts=["w:ten", "w:dis"])


def test_only_tensorwise_casts_gradients_to_the_wider_range() -> None:
    assert [recipe for recipe in FP8 if TRAITS[recipe].grad_output_dtype != E4M3] == ["tensorwise"]
    assert TRAITS["tensorwise"].grad_output_dtype == E5M2
    assert FLOAT8_MAX == {E4M3: 448.0, E5M2: 57344.0}


@pytest.mark.parametrize("recipe", TRAITS)
def test_a_case_has_the_facts_of_its_recipe_and_what_follows_from_them(recipe: Recipe) -> None:
    float8 = make_case(recipe=recipe).float8
    assert float8.traits is TRAITS[recipe]
    assert float8.enabled is (recipe != "bf16")
    case, traits = make_case(recipe=recipe), TRAITS[recipe]
    linears, roles = len(converted_fqns(case)), {gemm.role for gemm in gemms(case)}
    assert (linears > 0) is traits.converts
    assert ("wgrad" in roles) is traits.multiplies("wgrad")
    assert Expectations(case).scaled_mm_calls[0] == len(roles) * linears
    forms = {site.role: forms for site, forms in Expectations(case).casts.items()}
    assert {form.target_dtype for form in forms.get("grad_output", ())} == (
        {traits.grad_output_dtype} if traits.converts else set()
    )
    dims = [form.axiswise_dim for site_forms in Expectations(case).casts.values() for form in site_forms]
    assert all(dim is None for dim in dims) is (traits.one_scale_per_tensor or not traits.converts)


@pytest.mark.parametrize("recipe", FP8)
def test_options_that_a_recipe_does_not_have_are_excluded(recipe: Recipe) -> None:
    gathered = make_case(recipe=recipe, dp_shard=2, fp8_all_gather=True)
    styled = make_case(recipe=recipe, tp=2, tp_styles="float8")
    assert (exclusions(gathered) == ()) is TRAITS[recipe].gathers_weights_in_float8
    assert (exclusions(styled) == ()) is TRAITS[recipe].has_tp_styles


@pytest.mark.plugin("torchtitan")
def test_rules_of_a_plugin_are_about_its_targets() -> None:
    """Those that read no shape of a model hold for models that are not known, too."""
    by_name = {rule.name: rule for rule in EXCLUSIONS}
    rule = by_name["torchtitan_has_no_sgd"]
    for target, excluded in (("torchtitan", True), ("torchtitan.llama3", True), ("reference", False), ("mine", False)):
        assert rule.applies(make_case(target=target, optimizer="sgd")) is excluded
    assert by_name["torchtitan_converts_keys_with_values"].reads_shapes
