"""Parts of a selection: what fits into a budget, and shards of equal cost."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.casefile import parse_case_file
from harness.matrix.caseid import case_id
from harness.matrix.choice import Price, Pricing, Shard, cases_of_shard, parse_shard, shards, within_budget
from harness.matrix.tier import Selection, select
from harness.project import find_project
from harness.running.selection import Query, select_cases
from tests.builders import make_case

ROOT = Path(__file__).parents[2]
FILE = parse_case_file(
    """
[select]
strength = 2
[[matrix]]
name = "layouts"
[matrix.axes]
tp = [1, 2, 4]
recipe = ["bf16", "tensorwise", "rowwise"]
checkpointing = ["none", "full"]
""",
    where="small.toml",
)
SELECTION: Selection = select(FILE)


def by_ranks(case: Case) -> Price:
    return Price(own_s=float(case.world_size), shared_s={case.float8.recipe: 1.0})


@given(st.floats(min_value=0, max_value=80))
def test_everything_is_kept_or_named_and_the_budget_holds(budget_cpu_s: float) -> None:
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=budget_cpu_s)
    assert set(budgeted.cases) | set(budgeted.left_out) == set(SELECTION.cases)
    assert not set(budgeted.cases) & set(budgeted.left_out)
    shared = {name: cost_s for case in budgeted.cases for name, cost_s in by_ranks(case).shared_s.items()}
    assert budgeted.cost_cpu_s == pytest.approx(sum(case.world_size for case in budgeted.cases) + sum(shared.values()))
    assert budgeted.cost_cpu_s <= budget_cpu_s


def test_the_first_case_covers_most_per_second_and_a_large_budget_keeps_all_in_order() -> None:
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=2)
    assert [case.world_size for case in budgeted.cases] == [1]
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=1e6)
    assert budgeted.cases == SELECTION.cases and not budgeted.left_out


WITNESSES = st.dictionaries(st.sampled_from("abc"), st.floats(0, 50), max_size=2)
PRICES = st.lists(st.builds(Price, own_s=st.floats(0.1, 100), shared_s=WITNESSES), min_size=1, max_size=12)


def cases(count: int) -> list[Case]:
    return [make_case(seed=seed) for seed in range(count)]


def pricing(prices: list[Price]) -> Pricing:
    return lambda case: prices[case.train.seed]


@given(PRICES, st.integers(1, 15), st.randoms(use_true_random=False))
def test_every_case_is_in_one_shard_whatever_the_order(prices: list[Price], count: int, random: Random) -> None:
    given_cases, price = cases(len(prices)), pricing(prices)
    mixed = list(given_cases)
    random.shuffle(mixed)
    parts = shards(given_cases, count, price)
    assert sorted(name for part in parts for name in part) == sorted(map(case_id, given_cases))
    assert shards(mixed, count, price) == parts
    assert all(parts) or count > len(prices), "an empty shard, although there are cases enough"
    of_each = [cases_of_shard(given_cases, Shard(index=i + 1, count=count), price) for i in range(count)]
    assert [{case_id(case) for case in part} for part in of_each] == [set(part) for part in parts]


@given(PRICES, st.integers(1, 6))
def test_no_shard_has_more_to_do_than_its_share_and_one_case(prices: list[Price], count: int) -> None:
    price = pricing(prices)
    total_s = sum(case_price.extra_s(()) for case_price in prices)
    for part in shards(cases(len(prices)), count, price):
        own_s = sum(price(case).own_s for case in cases(len(prices)) if case_id(case) in part)
        assert own_s <= total_s / count + max(case_price.extra_s(()) for case_price in prices) + 1e-9


def test_dear_cases_and_witnesses_have_shards_of_their_own_and_an_empty_one_selects_nothing() -> None:
    price = pricing([Price(own_s=1.0)] * 6 + [Price(own_s=6.0)])
    assert sorted(map(len, shards(cases(7), 2, price))) == [1, 6]
    price = pricing([Price(own_s=1.0, shared_s={"ab"[seed % 2]: 50.0}) for seed in range(6)])
    even, odd = sorted(
        [case.train.seed % 2 for case in cases_of_shard(cases(6), Shard(index=index, count=2), price)]
        for index in (1, 2)
    )
    assert (even, odd) == ([0, 0, 0], [1, 1, 1])
    query = Query(sources=("single-bf16-v2048-b16",), shard=Shard(index=2, count=2))
    assert select_cases(find_project(ROOT), query) == ()


@pytest.mark.parametrize(
    "text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2", "\u0661/\u0662", "1/2\n"]
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(HarnessError, match="1/4"):
        parse_shard(text)


def test_a_shard_is_written_as_it_is_read() -> None:
    assert parse_shard("2/4").text == "2/4"
