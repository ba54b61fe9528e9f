"""Numerics: where the backend and the device promise no bits, nothing is judged as if they did, and nothing is lost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.evidence.tolerance import parity_key
from harness.expect.expectations import Expectations
from harness.expect.relations import partner
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, replayed_steps, sums_in_order
from harness.request import RunRequest
from harness.running.plan import Plan
from tests.builders import not_judged
from tests.strategies import TRAINED_CASES

GLOO = Numerics(in_rank_order=False)
NCCL = Numerics(in_rank_order=False, same_in_parts=False)


@pytest.mark.parametrize(
    ("facts", "numerics"),
    [
        ({}, VIRTUAL_DEVICE),
        ({"backend": "gloo"}, GLOO),
        ({"device": "cuda", "backend": "nccl", "arithmetic": "kernel"}, NCCL),
        ({"device": "cuda", "backend": "nccl", "arithmetic": "exact"}, NCCL),  # what is not converted has a kernel
        ({"arithmetic": "kernel"}, Numerics(same_in_parts=False)),
    ],
)
def test_a_plan_and_what_ranks_are_asked_promise_the_same_bits(facts: dict[str, Any], numerics: Numerics) -> None:
    assert Plan(**facts).numerics == RunRequest(case=Case(), **facts).numerics == numerics


@pytest.mark.parametrize(
    ("text", "on_the_fabric", "over_gloo"),
    [
        ("single-tensorwise-v2048-f32", True, True),
        ("fsdp2-tensorwise-v2048-f32", True, True),  # of two addends there is one order
        ("fsdp4-tensorwise-v2048-f32", True, False),
        ("hsdp2x2-tensorwise-v2048-f32", False, False),
        ("hsdp2x2-tensorwise-v2048-reduce.b16-f32", True, True),
        ("hsdp2x4-tensorwise-v2048-reduce.b16-f32", True, False),
        ("hsdp4x2-tensorwise-v2048-reduce.b16-f32", True, False),
        ("tp2-tensorwise-v2048-f32", False, False),  # one rank adds nothing there
    ],
)
def test_groups_of_more_than_two_ranks_have_the_order_of_their_fabric(
    text: str, on_the_fabric: bool, over_gloo: bool
) -> None:
    case = parse_case_id(text)
    assert sums_in_order(case) is on_the_fabric
    assert sums_in_order(case, GLOO) is over_gloo


def test_wide_fsdp_over_gloo_is_judged_as_replicas_are() -> None:
    case = parse_case_id("fsdp4-rowwise-ac.full-v2048-s2-f32")
    assert (parity_key(case), replayed_steps(case), partner(case)) == ("ordered", (), None)
    here = Expectations(case, numerics=GLOO)
    assert parity_key(case, GLOO) == "tiny-rowwise-replicas-float32"
    assert replayed_steps(case, GLOO) == (1, 2) and "module_tensors" not in here.not_recorded
    assert here.relation is not None and case_id(here.relation.partner) == "fsdp4-rowwise-v2048-s2-f32"
    case = parse_case_id("fsdp4-rowwise-graph-v2048-f32")
    assert not Expectations(case).stands_for_modules
    assert Expectations(case, numerics=GLOO).stands_for_modules


@pytest.mark.parametrize(
    ("text", "numerics", "reason"),
    [
        ("atp4-tensorwise-graph-v2048-b16", VIRTUAL_DEVICE, ""),
        ("atp4-tensorwise-graph-v2048-b16", GLOO, "sums in rank order"),
        ("atp2-tensorwise-graph-v2048-b16", GLOO, ""),
        ("atp2-tensorwise-graph-v2048-b16", NCCL, "chosen by their shape"),
        ("tp4-tensorwise-graph-v2048-b16", NCCL, ""),
    ],
)
def test_async_tp_has_no_partner_where_it_keeps_no_bits(text: str, numerics: Numerics, reason: str) -> None:
    expect = Expectations(parse_case_id(text), numerics=numerics)
    assert reason in not_judged(expect).get("metamorphic", "")
    assert (expect.relation is None) is bool(reason) is ("metamorphic" in not_judged(expect))
    assert expect.stands_for_modules is not bool(reason), "modules of a partner say nothing of a case with other bits"


NUMERICS = st.builds(Numerics, in_rank_order=st.booleans(), same_in_parts=st.booleans())


@given(TRAINED_CASES, NUMERICS)
def test_elsewhere_no_more_is_promised_and_no_more_is_left_out(case: Case, numerics: Numerics) -> None:
    assert sums_in_order(case) or not sums_in_order(case, numerics)
    assert {*replayed_steps(case, numerics)} >= {*replayed_steps(case)}
    here, there = Expectations(case), Expectations(case, numerics=numerics)
    assert there.not_recorded.keys() <= here.not_recorded.keys()
    assert not_judged(there).keys() - not_judged(here).keys() <= {"metamorphic"}
