"""The check `memory` finds every byte that is kept for backward too much or too little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.memory import OTHER_MODE, OUTLIVES, check_memory
from harness.expect.saved_memory import expected_saved
from harness.matrix.case import Case
from harness.trace.counts import SavedMemory
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, run_of, saved_as

CASE = make_case(tp=2, recipe="tensorwise", steps=2)
FULL = make_case(tp=2, recipe="tensorwise", steps=2, checkpointing="full")
Records = tuple[SavedMemory, ...]


def records(case: Case, rank: int = 0) -> Records:
    """What a correct run records."""
    return tuple(saved_as(step, expected_saved(case, step=step, rank=rank)) for step in (1, 2))


def check(case: Case, *saved: Records | None) -> list[Finding]:
    run = run_of(*(make_trace(case, rank, saved_memory=each) for rank, each in enumerate(saved)))
    return check_memory(case, run, make_witnesses(case))


@pytest.mark.parametrize("case", [CASE, FULL], ids=["none", "full"])
def test_what_the_formula_says_is_good(case: Case) -> None:
    assert check(case, records(case, 0), records(case, 1)) == []


@given(
    st.integers(0, 1), st.integers(1, 2), st.integers(-4, 4).filter(bool), st.sampled_from(["float32", "float8_e5m2"])
)
def test_one_byte_is_found_at_its_step_and_rank(rank: int, step: int, off: int, dtype: str) -> None:
    right = records(CASE)
    by_dtype = dict(right[step - 1].by_dtype)
    by_dtype[dtype] = by_dtype.get(dtype, 0) + off
    wrong = tuple(saved_as(step, by_dtype) if each.step == step else each for each in right)
    (found,) = check(CASE, *((wrong, right) if rank == 0 else (right, wrong)))
    assert (found.step, found.rank) == (step, rank)
    assert found.values["dtype"] == dtype and found.expected and found.found


def test_lost_checkpointing_is_told_in_plain_words() -> None:
    (found,) = check(FULL, records(CASE), records(CASE))
    assert found.rule == OTHER_MODE.name
    assert (found.values["mode"], found.values["asked"]) == ("none", "full")


def test_float8_that_outlives_forward_is_told_in_plain_words() -> None:
    wrong = tuple(saved_as(step, {**records(CASE)[0].by_dtype, "float8_e4m3fn": 81920}) for step in (1, 2))
    (found,) = check(CASE, wrong, wrong)
    assert (found.rule, found.values["dtype"]) == (OUTLIVES.name, "float8_e4m3fn")
    assert (found.expected, found.found) == ("0 bytes", "81920 bytes")


def test_a_step_that_was_not_recorded_is_found() -> None:
    (found,) = check(CASE, records(CASE)[:1], records(CASE))
    assert (found.step, found.rank, found.found) == (2, 0, "0 bytes")
