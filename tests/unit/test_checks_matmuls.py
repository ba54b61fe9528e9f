"""The check `matmuls` finds every scaled matmul that is missing or too much, at its step and on its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.fp8_on import NUMBER, check_matmuls
from harness.matrix.case import Case
from harness.trace import RankTrace
from harness.verdict import Finding, Verdict
from tests.builders import make_case, make_run, make_trace, make_witnesses, run_of

CALLS = 12
CASE = make_case(recipe="tensorwise", tp=2, steps=2, filter_fqns=("attention", "w3"))


def trace(rank: int, *calls: int) -> RankTrace:
    return make_trace(CASE, rank, calls=calls or CALLS)


def check(*traces: RankTrace, of: Case = CASE) -> list[Finding]:
    return check_matmuls(of, run_of(*traces), make_witnesses(of))


def test_as_many_as_the_case_asks_for() -> None:
    assert check(trace(0), trace(1)) == []


@pytest.mark.parametrize(
    ("axes", "calls"),
    [
        ({}, 0),
        ({"recipe": "tensorwise"}, 3 * 14),
        ({"recipe": "rowwise_with_gw_hp"}, 2 * 14),
        ({"recipe": "rowwise", "checkpointing": "full"}, 4 * 14),
    ],
)
def test_the_number_is_that_of_the_formula(axes: dict[str, object], calls: int) -> None:
    of = make_case(**axes)
    assert check_matmuls(of, make_run(of, calls=calls), make_witnesses(of)) == []
    assert check_matmuls(of, make_run(of, calls=calls + 1), make_witnesses(of))
    assert check_matmuls(of, make_run(of, calls=calls), make_witnesses(of, scaled_mm_calls=(calls + 1, calls + 1)))


@given(st.integers(0, 1), st.integers(0, 1), st.integers(0, 50).filter(lambda count: count != CALLS))
def test_any_other_number_of_calls_at_any_step_and_rank_fails(rank: int, index: int, count: int) -> None:
    calls = [count if at == index else CALLS for at in range(2)]
    (found,) = check(trace(rank, *calls), trace(1 - rank))
    assert (found.step, found.rank, found.verdict) == (index + 1, rank, Verdict.INVARIANT)
    assert found.expected == f"{CALLS} calls a step" and found.found == f"{count} calls"


def test_calls_that_cancel_out_over_steps_or_ranks_are_found() -> None:
    assert check(trace(0, CALLS - 1, CALLS + 1), trace(1))
    assert check(trace(0, CALLS - 1, CALLS), trace(1, CALLS + 1, CALLS))


def test_ranks_that_agree_share_a_finding_and_the_first_step_is_named() -> None:
    (found,) = check(trace(0, 9, 9), trace(1, 9, 3))
    assert (found.rule, found.step, found.ranks) == (NUMBER.name, 1, (0, 1))
    assert dict(found.values) == {"calls": 9, "wanted": "12"}
    first, second = check(trace(0, 9, 9), trace(1, 12, 3))
    assert (first.step, first.rank, second.step, second.rank) == (1, 0, 2, 1)


def test_the_order_of_ranks_does_not_matter() -> None:
    ranks = [trace(0), trace(1, 1, 2), trace(2, 12, 2), trace(3, 1, 2)]
    assert check(*ranks) == check(*reversed(ranks))
    assert [finding.rank for finding in check(*ranks)] == [1, 2]


def test_bf16_runs_none() -> None:
    bf16 = make_case(tp=2, steps=2)
    assert check(make_trace(bf16), make_trace(bf16, 1), of=bf16) == []
    (found,) = check(make_trace(bf16), make_trace(bf16, 1, calls=(0, 1)), of=bf16)
    assert (found.step, found.rank, found.expected) == (2, 1, "0 calls a step")
