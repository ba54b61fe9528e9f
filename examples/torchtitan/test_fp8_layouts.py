"""For torchtitan's tests/unit_tests/cpu/: the real Trainer keeps its numerics in every layout, on CPU ranks.

Each test trains a tiny Llama 3 in a layout and compares every gradient and parameter with one rank that computes the
same batch. It is skipped by name where fp8-harness is not installed. An assertion names the first scale, collective or
module that is wrong.
"""

import pytest

fp8_harness = pytest.importorskip("fp8_harness", reason="pip install fp8-harness")

LAYOUTS = ("single", "fsdp2", "tp2", "hsdp2x2", "fsdp2-tp2")
RECIPES = ("bf16", "rowwise", "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_rank(layout: str, recipe: str) -> None:
    fp8_harness.assert_case(f"target.torchtitan-{layout}-{recipe}-v2048-s2-b16")


@pytest.mark.parametrize("recipe", RECIPES)
def test_pipeline_trains_as_one_rank(recipe: str) -> None:
    fp8_harness.assert_case(f"target.torchtitan-pp2-{recipe}-v2048-s2-accum4-reduce.last-b16")
