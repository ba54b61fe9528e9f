"""Case ids: one spelling per case, safe as a file name, and exactly reversible."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes
from harness.matrix.case import Case, Train
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case


@given(st.from_type(Case))
def test_an_id_gives_its_case_back(case: Case) -> None:
    assert parse_case_id(case_id(case)) == case


@given(st.from_type(Case))
def test_an_id_is_a_file_name(case: Case) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", case_id(case) + family_id(case))


@given(st.text(max_size=60))
def test_any_text_is_an_id_or_a_clear_error(text: str) -> None:
    try:
        case = parse_case_id(text)
    except HarnessError:
        return
    assert case_id(case) == text


@given(st.from_type(Case), st.data())
def test_a_damaged_id_is_another_case_or_a_clear_error(case: Case, data: st.DataObject) -> None:
    text = case_id(case)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(["", "-", "x", "9", "."])) + text[at + 1 :]
    try:
        other = parse_case_id(damaged)
    except HarnessError:
        return
    assert case_id(other) == damaged


@given(st.from_type(Case))
def test_the_family_is_that_of_its_reference(case: Case) -> None:
    reference = reference_case(case)
    assert family_id(reference) == family_id(case)
    assert reference_case(reference) == reference
    assert reference.world_size == 1
    assert not reference.float8.enabled
    assert reference.train.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, "single-bf16-v2048-f32"),
        ({"tp": 4, "recipe": "rowwise", "checkpointing": "full", "vocab_size": 2256}, "tp4-rowwise-ac.full-v2256-f32"),
        (
            {"dp_shard": 4, "recipe": "tensorwise", "fp8_all_gather": True, "precompute_scale": True},
            "fsdp4-tensorwise-ag.fp8pre-v2048-f32",
        ),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "dtype": "bfloat16"}, "hsdp2x2-tp2-bf16-v2048-b16"),
        (
            {"tp": 4, "async_tp": True, "compile": "inductor", "loss_parallel": False},
            "atp4-nolp-bf16-inductor-v2048-f32",
        ),
        ({"vocab_size": 2256, "pad_vocab_to_multiple_of": 128}, "single-bf16-v2256-vpad128-f32"),
        ({"lr": 1e-5, "seed": 3, "loss_tolerance": 0.05}, "single-bf16-v2048-lr1e-05-seed3-f32-tol.0.05"),
        ({"model": "llama3-8b-layer", "layers": 2}, "single-bf16-llama3.8b.layer-layers.2-v2048-f32"),
        (
            {"recipe": "rowwise", "filter_fqns": ["wq", "wk"], "output_layer": True, "pad_inner_dim": True},
            "single-rowwise-head.fp8-pad-filter.wk+wq-v2048-f32",
        ),
    ],
)
def test_how_ids_read(axes: dict[str, object], expected: str) -> None:
    assert case_id(case_from_axes(axes)) == expected


def test_how_families_read() -> None:
    case = parse_case_id("tp4-rowwise-ac.full-v2256-vpad128-gb6-b16")
    assert family_id(case) == "tiny-v2256-s5-gb6-sl32-lr0.001-seed0"


def test_a_family_forgets_layout_precision_and_checks() -> None:
    a = parse_case_id("fsdp2-tp2-tensorwise-ag.fp8-ac.op-v2048-b16-tol.0.5")
    assert family_id(a) == family_id(Case())
    assert family_id(Case(train=Train(seed=1))) != family_id(Case())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp4-rowwize-v2048-f32", "unknown token 'rowwize'. Fix: did you mean rowwise"),
        ("single-bf16-v2048", "write single-bf16-v2048-f32"),
        ("bf16-single-v2048-f32", "write single-bf16-v2048-f32"),
        ("tp04-bf16-v2048-f32", "write tp4-bf16-v2048-f32"),
        ("single-bf16-pad-v2048-f32", "write single-bf16-v2048-f32"),
        ("tp0-bf16-v2048-f32", "tp = 0"),
        ("single-bf16-v0-f32", "vocab_size = 0"),
        ("single--bf16-v2048-f32", "single '-'"),
        ("", "single '-'"),
        ("v" + "1" * 5000, "single '-'"),
    ],
)
def test_mistakes_in_ids_are_explained(text: str, message: str) -> None:
    with pytest.raises(HarnessError, match=re.escape(message)):
        parse_case_id(text)
