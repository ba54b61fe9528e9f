"""Ids of cases and their words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import AXES, SCOPE, case_from_axes, checked_value, known_axis, out_of_scope
from harness.matrix.case import Case, Train
from harness.matrix.caseid import (
    WORDS,
    Word,
    case_id,
    family_id,
    hint,
    meaning_of,
    parse_case_id,
    reference_case,
    values_of,
)


@given(st.from_type(Case))
def test_an_id_gives_its_case_back_is_a_file_name_and_has_tokens_with_meanings(case: Case) -> None:
    assert parse_case_id(case_id(case)) == case
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", case_id(case) + family_id(case))
    tokens = re.findall(r"(?:(?:lr|clip|tol\.)[\d.]+e-\d+|[^-]+)", case_id(case))
    assert all(meaning_of(token) for token in tokens)


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


# One letter off a shorter word, such as b16, is as close to words of other kinds.
FLAGS = [word for word in WORDS if not word.stem and "+" not in word.example and len(word.example) > 4]


def test_every_word_has_a_meaning_and_names_axes() -> None:
    for example in [word.example for word in WORDS]:
        assert set(values_of(example) or {}) <= AXES.keys(), example
        assert "{" not in meaning_of(example), example
        assert sum(word.pattern.fullmatch(example) is not None for word in WORDS) == 1, example


@pytest.mark.parametrize(
    ("token", "fix"),
    [
        ("context_parallel2", "did you mean cp2?"),
        ("per.row", "did you mean rowwise?"),
        ("mxfp4", "leave it out: MX formats other than MXFP8 is out of scope: "),
        ("nvfp4", "leave it out: NVFP4 is out of scope: "),
        ("delayed", "leave it out: delayed scaling is out of scope: "),
        ("ddp", "see `fp8-harness explain --list ids`."),
        ("etp2", "leave it out: expert tensor parallelism is out of scope: "),
        ("compile", "did you mean graph or inductor?"),
        ("llama3-8b-layer", "did you mean llama3.8b.layer?"),
        ("bfloat16", "did you mean b16 or param.b16 or reduce.b16?"),
        ("selective_op", "did you mean ac.op?"),
        ("steps10", "did you mean s10?"),
        ("atpp4", "did you mean atp4 or tp4?"),
        ("fdsp2", "did you mean fsdp2?"),
        ("dim512", "did you mean dim.512?"),
        ("acfull", "did you mean ac.full?"),
        ("head.f8", "did you mean head.fp8?"),
        ("a.fp8", "did you mean ag.fp8 or ag.fp8pre?"),
        ("xyz", "see `fp8-harness explain --list ids`."),
    ],
)
def test_hints(token: str, fix: str) -> None:
    assert hint(token).startswith(fix)
    with pytest.raises(HarnessError, match=re.escape(fix)):
        parse_case_id(f"single-{token}-v2048-f32")


@given(st.sampled_from(FLAGS), st.data())
def test_a_hint_for_a_damaged_word_names_words_of_its_kind(word: Word, data: st.DataObject) -> None:
    example, part = word.example, word.part
    at = data.draw(st.integers(1, len(example) - 1))
    damaged = example[:at] + data.draw(st.sampled_from(["", "x"])) + example[at + 1 :]
    if values_of(damaged) is not None or damaged in AXES:
        return
    named = re.findall(r"[^ ]+", hint(damaged).removeprefix("did you mean ").rstrip("?").replace(" or ", " "))
    suggested = [token for token in named if values_of(token) is not None]
    assert {other.part for token in suggested for other in WORDS if other.pattern.fullmatch(token)} <= {part}


def test_what_is_out_of_scope_is_named_and_no_axis_and_no_word_is() -> None:
    with pytest.raises(HarnessError, match=r"FSDP1 is out of scope: .* Fix: write single-bf16-v2048-f32"):
        parse_case_id("fsdp1-bf16-v2048-f32")
    assert [name for name in AXES if out_of_scope(name)] == []
    assert [word.example for word in WORDS if out_of_scope(word.example)] == []
    assert all(feature.text.startswith(feature.name) for feature in SCOPE)
    with pytest.raises(HarnessError, match=r"unknown axis 'delayed_scaling'\. Fix: leave it out: delayed scaling"):
        known_axis("delayed_scaling")
    with pytest.raises(HarnessError, match="MX formats"):
        checked_value("recipe", "mxfp4")
