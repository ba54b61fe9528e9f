"""What each recipe does: the facts as torchao 0.18 has them, and what follows from them in a case."""

from __future__ import annotations

from typing import get_args

import pytest

from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.model import scaled_mm_calls
from harness.matrix.caseid import case_id
from harness.matrix.linears import converted_fqns, gemms
from harness.matrix.recipes import E4M3, E5M2, FLOAT8_MAX, OPERANDS, TRAITS, Recipe
from harness.matrix.rules import exclusions
from tests.builders import make_case

MXFP8 = {"mxfp8", "mxfp8_floor", "mxfp8_with_gw_hp"}
FP8 = [recipe for recipe, traits in TRAITS.items() if traits.converts]


def recipes_that(name: str) -> set[str]:
    """The recipes of which a fact is true."""
    return {recipe for recipe, traits in TRAITS.items() if getattr(traits, name)}


def test_every_recipe_has_its_facts() -> None:
    assert set(TRAITS) == set(get_args(Recipe))


# Read off `Float8LinearConfig.from_recipe_name`, `Float8Linear` and `mx_mm` of torchao 0.18.
@pytest.mark.parametrize(
    ("fact", "recipes"),
    [
        ("converts", {"tensorwise", "rowwise", "rowwise_with_gw_hp", *MXFP8}),
        ("in_blocks", MXFP8),
        ("rounds_scales_down", {"mxfp8_floor"}),
        ("one_scale_per_tensor", {"tensorwise"}),
        ("one_scale_per_weight_in_dgrad", {"tensorwise", "rowwise_with_gw_hp"}),
        ("power_of_two_scales", {"rowwise", "rowwise_with_gw_hp", *MXFP8}),
        ("writes_bfloat16", {"rowwise", "rowwise_with_gw_hp", *MXFP8}),
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
    assert scaled_mm_calls(case) == len(roles) * linears
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
