"""`assert_handoff` with functions: a state of DTensors that ranks build, export, update and load again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fp8_harness import assert_handoff
from harness.errors import HarnessError
from tests.plugins.handoff.trainers import LAYOUTS, exported, quantized, weights

Tensors = Mapping[str, Any]


def build() -> Tensors:
    return LAYOUTS["fsdp2"][1]()


def export(state: Tensors) -> Tensors:
    return exported(state, "fp8_block128")


def load(made: Tensors) -> Tensors:
    """Return what an exported state stands for, in the blocks of 128."""
    state = {}
    for name, data in made.items():
        if f"{name}_scale" in made:
            scale = made[f"{name}_scale"].repeat_interleave(128, 0)[: data.shape[0]]
            state[name] = data.float() * scale.repeat_interleave(128, 1)[:, : data.shape[1]]
        elif not name.endswith("_scale"):
            state[name] = data
    return state


def step(state: Tensors) -> None:
    with torch.no_grad():
        for name, each in state.items():
            if "layers.1" in name:
                each.mul_(-1)


def export_with_a_rank_of_its_own(state: Tensors) -> Tensors:
    made = dict(export(state))
    if torch.distributed.get_rank() == 1:
        made["model.layers.0.input_layernorm.weight"] += 1
    return made


def test_a_hand_off_of_ranks_with_an_update_and_a_round_trip_is_right() -> None:
    assert_handoff(build, export, format="fp8_block128", ranks=2, update=step, load=load)


def test_a_rank_that_exports_something_else_is_named() -> None:
    with pytest.raises(AssertionError, match=r"replicas in .*layers.0.input_layernorm.weight: ranks 0-1 hold"):
        assert_handoff(build, export_with_a_rank_of_its_own, format="fp8_block128", ranks=2)


def test_bad_input_is_said_without_frames_of_the_harness() -> None:
    for source, made, words in (
        ({}, {}, "it has no tensors"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, {}, "not known"),
    ):
        with pytest.raises(HarnessError, match=words) as raised:
            assert_handoff(source, made, format="fp8_row")
        assert len(raised.traceback) <= 2
    with pytest.raises(TypeError, match="a lambda"):
        assert_handoff(lambda: {"a": 1}, export, format="fp8_row")


def test_scales_that_divide_are_read_as_such() -> None:
    """As torchao's training has them: what the cast multiplied with."""
    state = {name: each for name, each in weights().items() if name.endswith("_proj.weight")}
    made: dict[str, torch.Tensor] = {}
    for name, each in state.items():
        data, scale = quantized(each, "fp8_tensor")
        made |= {name: data, f"{name}_scale": 1 / scale}
    assert_handoff(state, made, format="fp8_tensor_divided")
    with pytest.raises(AssertionError, match="they are the reciprocals"):
        assert_handoff(state, made, format="fp8_tensor")


def test_what_is_cast_to_bfloat16_first_is_said_and_may_be_declared() -> None:
    state = {name: each for name, each in weights().items() if name.endswith("_proj.weight")}
    made = exported({name: each.bfloat16() for name, each in state.items()}, "fp8_row")
    with pytest.raises(AssertionError, match="give --through bfloat16"):
        assert_handoff(state, made, format="fp8_row")
    assert_handoff(state, made, format="fp8_row", through="bfloat16")
