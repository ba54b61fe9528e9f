"""The check `finite` finds every missing rank, missing step and number that is not one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.reported import GRAD_NORM, LOSS, NO_TRACE, OTHER_WORLD, SEVERAL_TRACES, STEPS, check_finite
from harness.matrix.case import Case
from harness.sentence import format_ranks
from harness.trace import Run
from harness.verdict import Finding, Verdict
from tests.builders import make_case, make_run, make_steps, make_witnesses, run_of, with_rank, with_step


def case(tp: int = 2, steps: int = 3) -> Case:
    return make_case(tp=tp, steps=steps)


def run(world: int = 2, steps: int = 3) -> Run:
    return make_run(case(world), losses=(7.0,) * steps)


def check(found: Run, of: Case | None = None) -> list[Finding]:
    of = of or case()
    return check_finite(of, found, make_witnesses(of))


@given(st.integers(1, 8), st.integers(1, 6))
def test_a_whole_run_has_no_findings(tp: int, steps: int) -> None:
    assert check(run(tp, steps), case(tp, steps)) == []


@given(
    st.integers(1, 3), st.integers(0, 1), st.sampled_from(["loss", "grad_norm"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)  # fmt: skip
def test_no_number_that_is_not_finite_passes(number: int, rank: int, quantity: str, value: float) -> None:
    findings = check(with_step(run(), rank, number, **{quantity: value}))
    assert len(findings) == 1
    found = findings[0]
    assert (found.step, found.rank, found.verdict) == (number, rank, Verdict.NUMERIC)
    assert found.rule == {"loss": LOSS, "grad_norm": GRAD_NORM}[quantity].name
    assert dict(found.values) == {"quantity": quantity, "value": str(value), "count": 1}


@pytest.mark.parametrize("norm", [0.0, -0.0, -1.0])
def test_a_gradient_that_vanishes_is_found(norm: float) -> None:
    assert [finding.step for finding in check(with_step(run(), 1, 2, grad_norm=norm))] == [2]


def test_a_loss_of_zero_is_a_number() -> None:
    assert check(with_step(run(), 1, 2, loss=0.0)) == []


def test_the_first_step_wins_then_the_lowest_rank_and_all_are_counted() -> None:
    broken = run()
    for rank, number in ((0, 3), (1, 3), (1, 2)):
        broken = with_step(broken, rank, number, loss=math.nan)
    (found,) = check(broken)
    assert (found.step, found.rank) == (2, 1)
    assert (found.rule, found.values["count"], found.ranks) == (LOSS.name, 3, (0, 1))


@given(st.permutations(range(4)), st.sets(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=4))
def test_the_order_of_ranks_does_not_matter(order: list[int], bad: set[tuple[int, int]]) -> None:
    broken = run(4)
    for rank, number in bad:
        broken = with_step(broken, rank, number, loss=math.nan)
    shuffled = run_of(*(broken.traces[index] for index in order))
    assert check(shuffled, case(4)) == check(broken, case(4))


@given(st.integers(0, 1), st.integers(1, 3))
def test_dropping_any_step_on_any_rank_fails(rank: int, number: int) -> None:
    broken = with_rank(run(), rank, lambda t: replace(t, steps=tuple(s for s in t.steps if s.step != number)))
    (found,) = check(broken)
    assert found.rank == rank and found.verdict is Verdict.INVARIANT


@pytest.mark.parametrize("numbers", [(), (1, 2), (1, 2, 3, 4), (0, 1, 2), (1, 3, 2), (1, 2, 2), (1, 1, 2, 3)])
def test_only_steps_1_to_n_in_order_are_right(numbers: tuple[int, ...]) -> None:
    (one,) = make_steps([7.0])
    (found,) = check(make_run(case(), steps=tuple(replace(one, step=number) for number in numbers)))
    assert (found.rule, found.ranks, found.values["steps"]) == (STEPS.name, (0, 1), 3)


def test_an_empty_run_fails() -> None:
    (found,) = check(run_of())
    assert (found.rule, found.ranks) == (NO_TRACE.name, (0, 1))


def test_every_rank_must_answer_exactly_once() -> None:
    full = run(3).traces
    for traces, rule, rank in (
        (full[:1], NO_TRACE, 1),
        (full, OTHER_WORLD, 2),
        ((full[0], full[1], full[1]), SEVERAL_TRACES, 1),
    ):
        assert [(finding.rule, finding.ranks) for finding in check(run_of(*traces))] == [(rule.name, (rank,))]


def test_ranks_in_words() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([6, 1, 0, 3, 2, 6]) == "ranks 0-3, 6"
    assert format_ranks([0, 2, 4]) == "ranks 0, 2, 4"
    assert format_ranks([16, 1]) == "ranks 1, 16"


def test_the_words_of_the_findings() -> None:
    (lost,) = check(run(1), case(3))
    assert (lost.rule, lost.rank, lost.ranks, lost.found) == (NO_TRACE.name, 1, (1, 2), "1 trace")
    (none, *_) = check(run(2, steps=0))
    assert none.found == "0 steps: none"
    (short,) = check(run(2, steps=12), case(steps=13))
    assert short.found == "12 steps: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert (short.expected or "").endswith("11, 12, …")
    (bad,) = check(with_step(run(), 0, 2, loss=math.nan))
    assert (bad.expected, bad.found) == ("a finite number", "nan")
    (bad,) = check(with_step(run(), 0, 2, grad_norm=0.0))
    assert (bad.expected, bad.found) == ("a finite number above 0", "0.0")
