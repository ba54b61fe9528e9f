"""The budget: the best part of a selection for so many seconds, and what was left out by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.matrix.case import Case
from harness.matrix.casefile import parse_case_file
from harness.matrix.cheap_cover import Price
from harness.matrix.parts import within_budget
from harness.matrix.tier import Selection, select
from harness.project import find_project
from harness.running.cost import START_S, cases_within
from harness.running.selection import NothingSelected, Query, select_cases, select_sources

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
    found = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=budget_cpu_s)
    assert set(found.cases) | set(found.left_out) == set(SELECTION.cases)
    assert not set(found.cases) & set(found.left_out)
    shared = {name: cost_s for case in found.cases for name, cost_s in by_ranks(case).shared_s.items()}
    assert found.cost_cpu_s == pytest.approx(sum(case.world_size for case in found.cases) + sum(shared.values()))
    assert found.cost_cpu_s <= budget_cpu_s


def test_the_first_case_covers_most_per_second() -> None:
    found = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=2)
    assert [case.world_size for case in found.cases] == [1]


def test_a_large_budget_keeps_everything_in_order() -> None:
    found = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=1e6)
    assert found.cases == SELECTION.cases and not found.left_out


def test_seconds_of_this_machine_choose_from_the_pr_tier() -> None:
    project, query = find_project(ROOT), Query(sources=("pr",))
    cases, selections = select_cases(project, query), select_sources(project, query)
    minute, hour = (cases_within(project, cases, selections, seconds) for seconds in (60, 3600 * 10))
    assert 0 < len(minute.cases) < len(cases)
    assert not hour.left_out
    with pytest.raises(NothingSelected, match="no case fits"):
        cases_within(project, cases, selections, START_S)
