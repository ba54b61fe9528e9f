"""The estimate of a case before it starts: what was measured where it was, a rough number for a larger model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from harness.evidence.costs import RANK_BYTES, estimate, read_costs
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.linears import parameter_count
from harness.project import Project
from harness.running.cost import expected_cost
from harness.store import RunStore
from tests.builders import make_attempt, make_case, make_result
from tests.strategies import CASES

ROOT = Path(__file__).parents[2]
COSTS = read_costs(ROOT)


def test_the_parameters_of_the_tiny_model() -> None:
    assert parameter_count(Case()) == 2 * 2048 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256) + 5 * 128


def test_a_measured_model_is_not_rough() -> None:
    found = estimate(make_case(tp=2, recipe="rowwise"), COSTS)
    assert not found.rough
    assert found.case_cpu_s == COSTS.case_s(make_case(tp=2, recipe="rowwise"))


@pytest.mark.parametrize(
    ("axes", "cpu_s"),  # what such cases took: two ranks, two steps, bfloat16
    [({"dim": 512, "layers": 4, "ffn_dim": 1408}, 12.9), ({"dim": 1024, "heads": 16, "ffn_dim": 2816}, 15.2)],
)
def test_a_larger_model_is_a_rough_estimate_within_a_factor_of_two(axes: dict[str, object], cpu_s: float) -> None:
    found = estimate(make_case(tp=2, recipe="rowwise", steps=2, dtype="bfloat16", **axes), COSTS)
    assert found.rough
    assert cpu_s / 2 < found.case_cpu_s < 2 * cpu_s
    assert RANK_BYTES < found.process_bytes < found.all_bytes < 10e9


def test_records_of_more_steps_need_memory_up_to_what_a_replay_is_given() -> None:
    axes = {"dim": 512, "layers": 4, "ffn_dim": 1408, "tp": 2, "dtype": "bfloat16"}
    one, few, many = (estimate(make_case(steps=steps, **axes), COSTS) for steps in (1, 4, 50))
    assert one.all_bytes < few.all_bytes == many.all_bytes < 10e9


@given(CASES)
def test_every_case_has_an_estimate(case: Case) -> None:
    found = estimate(case, COSTS)
    assert found.case_cpu_s > 0 and found.witness_cpu_s >= 0 and found.process_bytes > RANK_BYTES


def test_a_case_that_ran_here_is_measured(tmp_path: Path) -> None:
    project, case = Project(root=ROOT, state=tmp_path), make_case(tp=2, recipe="rowwise")
    assert expected_cost(project, case).basis[0].startswith("estimated: from ")
    attempt = make_attempt(wall_s=3.0, cpu_s=7.0)
    RunStore(project.new_run()).append(make_result(case_id(case), attempts=(attempt,)))
    RunStore(project.new_run()).append(make_result(case_id(Case())))
    found = expected_cost(project, case)
    assert found.case_cpu_s == 7.0
    assert found.basis[0].startswith("measured: ")
