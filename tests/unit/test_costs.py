"""Costs are fitted to what a run measured, and to nothing that ran twice or under other probes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.evidence.costs import case_features, read_costs, solo_features
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, solo_case
from harness.matrix.rules import expected_refusal
from harness.project import find_project
from harness.result import CaseResult, WitnessMade
from harness.running.selection import Query, select_cases
from harness.store import run_lines
from harness.studies.records import fit_costs
from harness.verdict import Verdict
from tests.builders import make_attempt, make_result, make_results

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
    witnesses: Sequence[WitnessMade] = (),
) -> Path:
    """A run of tier pr in which everything cost exactly what the stored weights say."""
    chosen = [case for case in tier_pr()[:first] if expected_refusal(case) is None]
    solos = {case_id(solo_case(case)): solo_case(case) for case in chosen}

    def cost(weights, features) -> float:
        return sum(weights.get(name, 0) * value for name, value in features.items())

    results = [of(case_id(case), cost(COSTS.case, case_features(case))) for case in chosen]
    made = [
        WitnessMade(name=f"solo {name}", cpu_s=cost(COSTS.solo, solo_features(case))) for name, case in solos.items()
    ]
    software = {"torch": "2.13.0", "torchao": "0.18.0", "python": "3.11"}
    path = folder / "run.jsonl"
    path.write_bytes(run_lines(make_results(*results, *more, provenance=software, witnesses=(*made, *witnesses))))
    return path


def test_the_weights_of_a_run_are_found_again(tmp_path: Path) -> None:
    found = fit_costs(stored(tmp_path), command="fit")
    for case in tier_pr():
        assert found.case_s(case) == pytest.approx(COSTS.case_s(case), rel=0.01, abs=0.01)
    assert found.typical_error < 0.001
    assert found.software == {"torch": "2.13.0", "torchao": "0.18.0"}


def test_runs_that_say_nothing_of_one_run_are_left_out(tmp_path: Path) -> None:
    more = (of("tp2-tensorwise-v2048-f64", 999, Verdict.KNOWN), of("tp4-tensorwise-v2048-f64", 999, Verdict.HANG))
    others = [
        WitnessMade(name=f"{kind} single-tensorwise-v2048-f64", cpu_s=999)
        for kind in ("solo with operands", "replayed partner", "reference", "replay")
    ]
    with_more = fit_costs(stored(tmp_path, *more, witnesses=others), command="fit")
    without = fit_costs(stored(tmp_path), command="fit")
    assert (with_more.case, with_more.solo) == (without.case, without.solo)


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="of each are needed"):
        fit_costs(stored(tmp_path, first=12), command="fit")
