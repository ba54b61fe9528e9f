"""The words of case ids: each means one thing, and a hint for a wrong one names words of its kind."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import AXES, checked_value, known_axis
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.scope import SCOPE, out_of_scope
from harness.matrix.words import WORDS, Word, hint, meaning_of, values_of

# One letter off a shorter word, such as b16, is as close to words of other kinds.
FLAGS = [word for word in WORDS if not word.stem and "+" not in word.example and len(word.example) > 4]


def test_every_word_has_a_meaning_and_names_axes() -> None:
    for example in [word.example for word in WORDS]:
        assert set(values_of(example) or {}) <= AXES.keys(), example
        assert "{" not in meaning_of(example), example
        assert sum(each.pattern.fullmatch(example) is not None for each in WORDS) == 1, example


@given(st.from_type(Case))
def test_every_token_of_an_id_has_a_meaning(case: Case) -> None:
    tokens = re.findall(r"(?:(?:lr|clip|tol\.)[\d.]+e-\d+|[^-]+)", case_id(case))
    assert all(meaning_of(token) for token in tokens)


@pytest.mark.parametrize(
    ("token", "fix"),
    [
        ("cp2", "leave it out: context parallelism is out of scope: "),
        ("pp4", "leave it out: pipeline parallelism is out of scope: "),
        ("mxfp8", "leave it out: MX scaling (MXFP8) is out of scope: "),
        ("nvfp4", "leave it out: NVFP4 is out of scope: "),
        ("delayed", "leave it out: delayed scaling is out of scope: "),
        ("ddp", "leave it out: DDP is out of scope: "),
        ("moe8", "leave it out: expert parallelism (mixture of experts) is out of scope: "),
        ("compile", "did you mean graph or inductor?"),
        ("llama3-8b-layer", "did you mean llama3.8b.layer?"),
        ("bfloat16", "did you mean b16 or param.b16 or reduce.b16?"),
        ("selective_op", "did you mean ac.op?"),
        ("steps10", "did you mean s10?"),
        ("tpp4", "did you mean tp4 or atp4?"),
        ("fdsp2", "did you mean fsdp2?"),
        ("dim512", "did you mean dim.512?"),
        ("acfull", "did you mean ac.full?"),
        ("head.f8", "did you mean head.fp8?"),
        ("a.fp8", "did you mean ag.fp8 or ag.fp8pre?"),
        ("xyz", "see `fp8-harness explain --ids`."),
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
    assert {each.part for token in suggested for each in WORDS if each.pattern.fullmatch(token)} <= {part}


def test_fsdp1_is_named_although_its_word_has_a_meaning() -> None:
    with pytest.raises(HarnessError, match=r"FSDP1 is out of scope: .* Fix: write single-bf16-v2048-f32"):
        parse_case_id("fsdp1-bf16-v2048-f32")


def test_no_axis_and_no_word_but_ddp_is_out_of_scope() -> None:
    assert [name for name in AXES if out_of_scope(name)] == []
    assert [word.example for word in WORDS if out_of_scope(word.example)] == ["ddp2"]
    assert all(each.text.startswith(each.name) for each in SCOPE)


def test_axes_and_values_that_are_out_of_scope_are_named() -> None:
    with pytest.raises(HarnessError, match=r"unknown axis 'cp'\. Fix: leave it out: context parallelism"):
        known_axis("cp")
    with pytest.raises(HarnessError, match="MX scaling"):
        checked_value("recipe", "mxfp8")
