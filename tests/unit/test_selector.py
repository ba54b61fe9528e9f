"""Selectors: what each term means, and mistakes with suggestions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import axis_values
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.selector import parse_selector

CASE = parse_case_id("fsdp2-tp4-tensorwise-ag.fp8-filter.wk+wq-ac.full-v2256-f32")


TERMS = {
    "": True,
    "tp=4": True,
    "tp=4,8": True,
    "tp=2,8": False,
    "tp!=4": False,
    "tp!=2,8": True,
    "recipe!=bf16 tp=4": True,
    "recipe!=bf16 tp=2": False,
    "vocab_size>=2256": True,
    "vocab_size>2256": False,
    "vocab_size<=2256": True,
    "vocab_size<2256": False,
    "lr<0.01": True,
    "loss_tolerance>0": False,
    "dim=128": True,
    "seed>=-1": True,
    "fp8_all_gather=true": True,
    "fp8_all_gather=no": False,
    "checkpointing=full": True,
    "filter_fqns=wq+wk": True,
    "filter_fqns=none": False,
    "world_size=8": True,
    "world_size<8": False,
    "local_batch>=2": True,
    "local_batch=1": False,
    "id~*ac.full*": True,
    "id~fsdp2-*-f32": True,
    "id~ac.full": False,
    "ac.full": True,
    "hsdp": False,
}


def test_what_terms_mean() -> None:
    assert {text: parse_selector(text).matches(CASE) for text in TERMS} == TERMS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=4", "selector 'tpp=4': unknown axis 'tpp'. Fix: did you mean tp"),
        ("recipe=rowwize", "did you mean rowwise"),
        ("tp=four", "axis 'tp' cannot be 'four'. Fix: write a number"),
        ("world_size=two", "axis 'world_size' cannot be 'two'. Fix: write a number"),
        ("world_siz=2", "did you mean world_size"),
        ("tp=0", "tp = 0"),
        ("tp>=four", "cannot be compared with 'four'"),
        ("lr<nan", "cannot be compared with 'nan'"),
        ("tp=", "axis 'tp' cannot be ''"),
        ("lr=nan", "lr = nan"),
        ("async_tp=maybe", "axis 'async_tp' cannot be 'maybe'"),
        ("recipe>=bf16", "axis 'recipe' has no order"),
        ("tp~4", "~ only works with id"),
        ("id=x", "unknown axis 'id'"),
        ("$$", "neither a condition nor part of an id"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(HarnessError, match=re.escape(message)):
        parse_selector(text)


@given(st.from_type(Case), st.sampled_from(["tp", "recipe", "vocab_size", "lr", "seed", "dtype", "dp_shard"]))
def test_a_case_is_selected_by_its_own_values(case: Case, axis: str) -> None:
    value = axis_values(case)[axis]
    assert parse_selector(f"{axis}={value}").matches(case)
    assert not parse_selector(f"{axis}!={value}").matches(case)
    assert parse_selector(f"id~{case_id(case)}").matches(case)


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_a_clear_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except HarnessError:
        return
    selector.matches(CASE)
