"""Axes: flat values and cases are two spellings of the same thing, and mistakes are named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_type, axis_values, case_from_axes, checked_value, choices, ignored_axes
from harness.matrix.case import Case, Float8, Layout, Model


@given(st.from_type(Case))
def test_case_to_axes_and_back(case: Case) -> None:
    assert case_from_axes(axis_values(case)) == case


@given(st.from_type(Case))
def test_a_case_ignores_none_of_its_own_values(case: Case) -> None:
    assert ignored_axes(axis_values(case)) == ()


def test_every_field_of_a_case_has_an_axis() -> None:
    fields = {
        (part, field)
        for part in ("model", "layout", "float8", "checkpointing", "train", "checks")
        for field in type(getattr(Case(), part)).__struct_fields__
    }
    assert set(AXES.values()) == fields | {("compile",), ("target",)}


def test_defaults_are_the_default_case() -> None:
    assert case_from_axes({}) == Case()


def test_values_reach_their_place() -> None:
    case = case_from_axes({"tp": 2, "recipe": "rowwise", "vocab_size": 2256, "filter_fqns": ["wk", "wq"]})
    assert case == Case(
        model=Model(vocab_size=2256), layout=Layout(tp=2), float8=Float8(recipe="rowwise", filter_fqns=("wk", "wq"))
    )


def test_an_unknown_axis_is_named_with_a_suggestion() -> None:
    with pytest.raises(HarnessError, match=r"unknown axis 'vocabsize'\. Fix: did you mean vocab_size"):
        case_from_axes({"vocabsize": 3})


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("recipe", "tensorwize", "recipe = tensorwize: .*did you mean tensorwise"),
        ("tp", 0, "tp = 0: .*>= 1"),
        ("tp", True, "tp = true: Expected `int`"),
        ("dp_shard", "2", "dp_shard = 2: Expected `int`"),
        ("filter_fqns", ["a-b"], "filter_fqns"),
        ("vocab_size", 0, "vocab_size = 0"),
        ("steps", 0, "steps = 0"),
        ("lr", math.nan, "lr"),
        ("loss_tolerance", math.inf, "loss_tolerance"),
        ("loss_tolerance", math.nan, "loss_tolerance"),
    ],
)
def test_an_impossible_value_is_refused_either_way(axis: str, value: object, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        checked_value(axis, value)
    with pytest.raises(HarnessError):
        case_from_axes({axis: value})


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(HarnessError, match="does not split into 3 heads"):
        case_from_axes({"heads": 3, "kv_heads": 3})


def test_ignored_options_are_found() -> None:
    assert ignored_axes({"recipe": "bf16", "pad_inner_dim": True, "output_layer": False}) == ("pad_inner_dim",)
    assert ignored_axes({"tp": 1, "loss_parallel": False}) == ("loss_parallel",)
    assert ignored_axes({"checkpointing": "full", "checkpoint_every": 3}) == ("checkpoint_every",)
    assert ignored_axes({"dim": 128, "loss_tolerance": None}) == ()


def test_types_and_choices() -> None:
    assert axis_type("tp") is int
    assert axis_type("lr") is float
    assert axis_type("loss_tolerance") is float
    assert axis_type("async_tp") is bool
    assert axis_type("recipe") is str
    assert axis_type("filter_fqns") is tuple
    assert choices("tp_styles") == ("plain", "float8")
    assert choices("async_tp") == (True, False)
    assert choices("seed") == ()
