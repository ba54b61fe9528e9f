"""Which blocks a checkpointing mode wraps: as torchtitan counts them, from 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.expect.model import recomputed_calls
from harness.matrix.case import Checkpointing, CheckpointMode
from tests.builders import make_case

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
    assert (recomputed_calls(case) > 0) is case.checkpointing.wraps(0)
