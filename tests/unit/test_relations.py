"""Relations: what is promised is promised about cases that train, and never more than torchao keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.evidence.tolerance import parity_key
from harness.expect.relations import Relation, partner, relations
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id, family_id, parse_case_id
from harness.matrix.rules import exclusions, expected_refusal
from tests.strategies import TRAINED_CASES


def promised(text: str) -> dict[str, str]:
    return {relation.name: case_id(relation.partner) for relation in relations(parse_case_id(text))}


def trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None


def partner_of(text: str) -> tuple[str, str] | None:
    relation = partner(parse_case_id(text))
    return None if relation is None else (relation.name, case_id(relation.partner))


@pytest.mark.parametrize(
    ("case", "name", "other"),
    [
        ("tp2-rowwise-ac.full-v2048-b16", "checkpointing", "tp2-rowwise-v2048-b16"),
        ("fsdp2-bf16-ac.layer2-v2048-f32", "checkpointing", "fsdp2-bf16-v2048-f32"),
        ("tp2-tensorwise-tpstyle.fp8-v2048-f32", "tp_styles", "tp2-tensorwise-v2048-f32"),
        ("tp2-rowwise-pad-v2048-b16", "pad_inner_dim", "tp2-rowwise-v2048-b16"),
        ("fsdp2-tensorwise-ag.fp8-v2048-f32", "fp8_all_gather", "fsdp2-tensorwise-v2048-f32"),
        ("hsdp2x2-tensorwise-ag.fp8pre-v2048-f64", "fp8_all_gather", "hsdp2x2-tensorwise-v2048-f64"),
        ("tp2-rowwise-v2048-eval-b16", "evaluate", "tp2-rowwise-v2048-b16"),
        ("tp2-rowwise-v2048-resume.resharded-b16", "resume", "tp2-rowwise-v2048-b16"),
        ("fsdp2-reshard.never-rowwise-v2048-b16", "reshard_after_forward", "fsdp2-rowwise-v2048-b16"),
        ("fsdp2-tensorwise-ag.fp8pre-v2048-b16", "precompute_scale", "fsdp2-tensorwise-ag.fp8-v2048-b16"),
    ],
)
def test_an_option_that_is_neutral_changes_no_bit(case: str, name: str, other: str) -> None:
    assert promised(case)[name] == other


def test_what_is_not_neutral_is_promised_nothing() -> None:
    """The master weight is float32; without the float8 all-gather its bfloat16 copy is cast."""
    assert "fp8_all_gather" not in promised("fsdp2-tensorwise-ag.fp8-v2048-b16")
    assert "pad_inner_dim" not in promised("fsdp8-tensorwise-pad-v2048-sl40-f64")
    assert "pad_inner_dim" in promised("fsdp4-tensorwise-pad-v2048-sl40-f64")
    assert partner_of("tp2-rowwise-ac.op-v2048-b16-tol.0.5") == ("checkpointing", "tp2-rowwise-v2048-b16")


@pytest.mark.parametrize("dtype", ["f64", "f32", "b16"])
def test_where_fsdp_meets_tp_the_gathered_scale_is_promised_nothing(dtype: str) -> None:
    """A dynamic scale is per TP rank, a precomputed one is global."""
    assert promised(f"fsdp2-tp4-tensorwise-ag.fp8pre-v2048-{dtype}") == {}
    assert promised(f"fsdp2-tp4-tensorwise-ag.fp8-v2048-{dtype}") == {}


@pytest.mark.parametrize("case", ["tp2-tensorwise-head.fp8-ac.full-v2256-f64", "fsdp8-tensorwise-ac.op-v2048-sl40-b16"])
def test_a_case_that_must_be_refused_has_no_relation(case: str) -> None:
    assert promised(case) == {}
    assert partner_of(case) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("tp2-rowwise-ac.op-v2048-b16", ("checkpointing", "tp2-rowwise-v2048-b16")),
        (
            "hsdp2x2-tensorwise-ag.fp8pre-pad-ac.full-v2048-f32",
            ("checkpointing+pad_inner_dim+fp8_all_gather", "hsdp2x2-tensorwise-v2048-f32"),
        ),
        ("hsdp2x2-tensorwise-ag.fp8pre-v2048-b16", ("precompute_scale", "hsdp2x2-tensorwise-ag.fp8-v2048-b16")),
        (
            "fsdp2-tp2-tensorwise-ag.fp8pre-tpstyle.fp8-ac.full-v2048-f64",
            ("checkpointing+tp_styles", "fsdp2-tp2-tensorwise-ag.fp8pre-v2048-f64"),
        ),
        ("fsdp2-tp2-tensorwise-ag.fp8pre-v2048-b16", None),
        ("tp2-rowwise-v2048-b16", None),
        ("tp2-rowwise-ac.full-v2048-f64", None),
        ("fsdp4-tensorwise-ag.fp8pre-ac.full-v2048-b16", None),
    ],
)
def test_the_partner_of_a_matrix_case(case: str, expected: tuple[str, str] | None) -> None:
    assert partner_of(case) == expected


def is_sound(relation: Relation, case: Case) -> bool:
    other = relation.partner
    same_data = family_id(other) == family_id(case) and other.train.dtype == case.train.dtype
    return trains(other) and same_data and other.layout.dp == case.layout.dp


@given(st.from_type(Case) | TRAINED_CASES)
def test_every_relation_is_about_two_cases_that_train_on_the_same_data(case: Case) -> None:
    for relation in relations(case):
        assert trains(case) and is_sound(relation, case) and relation.partner != case


def uncompiled_layout(case: Case) -> Layout:
    """The layout without what belongs to compiled blocks alone, and without what is gathered how often."""
    layout = replace(case.layout, async_tp=False, reshard_after_forward="default")
    return replace(case, compile="none", layout=layout).layout


@given(TRAINED_CASES)
def test_a_partner_is_for_what_parity_cannot_see_sharply(case: Case) -> None:
    relation = partner(case)
    if relation is None:
        return
    assert is_sound(relation, case)
    assert uncompiled_layout(relation.partner) == uncompiled_layout(case)
    assert partner(relation.partner) is None, "something neutral is left"
    one_scale = not (case.float8.fp8_all_gather and case.layout.tp > 1)
    assert not (one_scale and parity_key(case) in ("exact", "ordered"))
