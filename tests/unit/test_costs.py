"""Costs: what a run stores of them, and estimates by them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given

from harness.errors import HarnessError
from harness.evidence.costs import RANK_BYTES, case_features, estimate, read_costs, solo_features
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, solo_case
from harness.matrix.linears import parameter_count
from harness.matrix.rules import expected_refusal
from harness.project import Project, find_project
from harness.result import CaseResult, ReferenceRun
from harness.running.selection import Query, expected_cost, select_cases
from harness.store import RunStore, run_lines
from harness.studies.records import fit_costs
from harness.verdict import Verdict
from tests.builders import make_attempt, make_case, make_result, make_results
from tests.strategies import CASES

PROJECT = find_project()
COSTS = read_costs(PROJECT.root)


@functools.cache
def tier_pr() -> tuple[Case, ...]:
    return select_cases(PROJECT, Query(sources=("pr",)))


def of(name: str, cpu_s: float, verdict: Verdict = Verdict.PASSED) -> CaseResult:
    return make_result(name, verdict, attempts=(make_attempt(verdict, cpu_s=cpu_s),))


def stored(
    folder: Path,
    *more: CaseResult,
    first: int | None = None,
    witnesses: Sequence[ReferenceRun] = (),
) -> Path:
    """A run of tier pr in which everything cost exactly what the stored weights say."""
    chosen = [case for case in tier_pr()[:first] if expected_refusal(case) is None]
    solos = {case_id(solo_case(case)): solo_case(case) for case in chosen}

    def cost(weights, features) -> float:
        return sum(weights.get(name, 0) * value for name, value in features.items())

    results = [of(case_id(case), cost(COSTS.case, case_features(case))) for case in chosen]
    made = [
        ReferenceRun(kind="solo", name=f"solo {name}", cpu_s=cost(COSTS.solo, solo_features(case)))
        for name, case in solos.items()
    ]
    software = {"torch": "2.13.0", "torchao": "0.18.0", "python": "3.11"}
    path = folder / "run.jsonl"
    path.write_bytes(run_lines(make_results(*results, *more, provenance=software, references=(*made, *witnesses))))
    return path


def test_the_weights_of_a_run_are_found_again_and_too_few_runs_are_refused(tmp_path: Path) -> None:
    fitted = fit_costs(stored(tmp_path), command="fit")
    for case in tier_pr():
        assert fitted.case_s(case) == pytest.approx(COSTS.case_s(case), rel=0.01, abs=0.01)
    assert fitted.typical_error < 0.001
    assert fitted.software == {"torch": "2.13.0", "torchao": "0.18.0"}
    with pytest.raises(HarnessError, match="of each are needed"):
        fit_costs(stored(tmp_path, first=12), command="fit")


def test_runs_that_say_nothing_of_one_run_are_left_out(tmp_path: Path) -> None:
    more = (of("tp2-tensorwise-v2048-f64", 999, Verdict.KNOWN), of("tp4-tensorwise-v2048-f64", 999, Verdict.HANG))
    others = [
        ReferenceRun(kind="solo", name=f"{kind} single-tensorwise-v2048-f64", cpu_s=999)
        for kind in ("solo with operands", "replayed partner", "reference", "replay")
    ]
    with_more = fit_costs(stored(tmp_path, *more, witnesses=others), command="fit")
    without = fit_costs(stored(tmp_path), command="fit")
    assert (with_more.case, with_more.solo) == (without.case, without.solo)


ROOT = Path(__file__).parents[2]


def test_a_measured_model_is_not_rough_and_has_its_parameters() -> None:
    assert parameter_count(Case()) == 2 * 2048 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256) + 5 * 128
    estimated = estimate(make_case(tp=2, recipe="rowwise"), COSTS)
    assert not estimated.rough
    assert estimated.case_cpu_s == COSTS.case_s(make_case(tp=2, recipe="rowwise"))


@pytest.mark.parametrize(
    ("axes", "cpu_s"),  # what such cases took: two ranks, two steps, bfloat16
    [({"dim": 512, "layers": 4, "ffn_dim": 1408}, 12.9), ({"dim": 1024, "heads": 16, "ffn_dim": 2816}, 15.2)],
)
def test_a_larger_model_is_a_rough_estimate_within_a_factor_of_two(axes: dict[str, object], cpu_s: float) -> None:
    estimated = estimate(make_case(tp=2, recipe="rowwise", steps=2, dtype="bfloat16", **axes), COSTS)
    assert estimated.rough
    assert cpu_s / 2 < estimated.case_cpu_s < 2 * cpu_s
    assert RANK_BYTES < estimated.process_bytes < estimated.all_bytes < 10e9


def test_records_of_more_steps_need_memory_up_to_what_a_replay_is_given() -> None:
    axes = {"dim": 512, "layers": 4, "ffn_dim": 1408, "tp": 2, "dtype": "bfloat16"}
    one, few, many = (estimate(make_case(steps=steps, **axes), COSTS) for steps in (1, 4, 50))
    assert one.all_bytes < few.all_bytes == many.all_bytes < 10e9


@given(CASES)
def test_every_case_has_an_estimate(case: Case) -> None:
    estimated = estimate(case, COSTS)
    assert estimated.case_cpu_s > 0 and estimated.witness_cpu_s >= 0 and estimated.process_bytes > RANK_BYTES


def test_a_case_that_ran_here_is_measured(tmp_path: Path) -> None:
    project, case = Project(root=ROOT, state=tmp_path), make_case(tp=2, recipe="rowwise")
    assert expected_cost(project, case).basis[0].startswith("estimated: from ")
    attempt = make_attempt(wall_s=3.0, cpu_s=7.0)
    RunStore(project.new_run()).append(make_result(case_id(case), attempts=(attempt,)))
    RunStore(project.new_run()).append(make_result(case_id(Case())))
    expected = expected_cost(project, case)
    assert expected.case_cpu_s == 7.0
    assert expected.basis[0].startswith("measured: ")
