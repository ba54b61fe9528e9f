"""The signed-rank test: what is known of it by counting, and by symmetry."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.gate.times import signed_rank_p

small = st.lists(st.integers(-4, 4).map(float), max_size=7)


def counted(differences: list[float]) -> float:
    """The same p by trying all signs."""
    sizes = sorted(abs(value) for value in differences if value)
    ranks = [sum(other < size for other in sizes) + (sizes.count(size) + 1) / 2 for size in sizes]
    above = sum(ranks[sizes.index(abs(value))] for value in differences if value > 0)
    extreme = max(above, sum(ranks) - above)
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    return min(1.0, 2 * sum(each >= extreme for each in sums) / len(sums))


@given(small)
def test_few_cases_are_counted(differences: list[float]) -> None:
    assert signed_rank_p(differences) == pytest.approx(counted(differences))


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), max_size=60))
def test_slower_and_faster_are_the_same_question(differences: list[float]) -> None:
    p = signed_rank_p(differences)
    assert 0 <= p <= 1
    assert p == pytest.approx(signed_rank_p([-value for value in differences]))


def test_all_of_ten_in_one_direction_is_two_in_1024() -> None:
    assert signed_rank_p([0.1 * at for at in range(1, 11)]) == pytest.approx(2 / 1024)
    assert signed_rank_p([]) == signed_rank_p([0.0]) == 1.0


def test_many_cases_are_close_to_what_counting_gives() -> None:
    mixed = [(-1) ** (at % 3 == 0) * (1 + at / 100) for at in range(40)]
    assert signed_rank_p(mixed) == pytest.approx(signed_rank_p([*mixed, 1e-9]), abs=0.02)
