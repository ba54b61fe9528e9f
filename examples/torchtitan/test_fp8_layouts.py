"""For torchtitan's tests/unit_tests/cpu/: the real Trainer keeps its numerics under FSDP2 and TP, on CPU ranks.

Each test trains a tiny Llama 3 in a layout and compares every gradient and parameter with one rank that computes the
same batch. It is skipped by name where fp8-harness is not installed. An assertion names the first scale, collective or
module that is wrong. The workflow fp8_parity.yaml has all layouts and recipes.
"""

import pytest

fp8_harness = pytest.importorskip("fp8_harness", reason="pip install fp8-harness")


@pytest.mark.parametrize("layout", ["fsdp2-tp2"])
def test_layout_trains_as_one_rank(layout: str) -> None:
    fp8_harness.assert_case(f"target.torchtitan-{layout}-rowwise-v2048-s2-b16")
