"""Costs are fitted to what a run measured, and to nothing that ran twice or under other probes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.evidence.costs import case_features, read_costs, solo_features
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id, solo_case
from harness.matrix.rules import expected_refusal
from harness.project import find_project
from harness.running.selection import Query, select_cases
from harness.studies.costs import fit_costs

PROJECT = find_project()
COSTS = read_costs(PROJECT.root)


@functools.cache
def tier_pr() -> tuple[Case, ...]:
    return select_cases(PROJECT, Query(sources=("pr",)))


def report(folder: Path, *, first: int | None = None, **more: list[dict[str, object]]) -> Path:
    """A run of tier pr in which everything cost exactly what the stored weights say."""
    chosen = [case for case in tier_pr()[:first] if expected_refusal(case) is None]
    solos = {case_id(solo_case(case)): solo_case(case) for case in chosen}

    def cost(weights, features) -> float:
        return sum(weights.get(name, 0) * value for name, value in features.items())

    document = {
        "provenance": {"torch": "2.13.0", "torchao": "0.18.0", "python": "3.11"},
        "cases": [
            {"id": case_id(case), "verdict": "passed", "cpu_s": cost(COSTS.case, case_features(case))}
            for case in chosen
        ],
        "witnesses": [
            {"name": f"solo {name}", "cpu_s": cost(COSTS.solo, solo_features(case))} for name, case in solos.items()
        ],
    }
    for name, extra in more.items():
        document[name] += extra
    path = folder / "run.json"
    path.write_text(json.dumps(document))
    return path


def test_the_weights_of_a_run_are_found_again(tmp_path: Path) -> None:
    found = fit_costs(report(tmp_path), command="fit")
    for case in tier_pr():
        assert found.case_s(case) == pytest.approx(COSTS.case_s(case), rel=0.01, abs=0.01)
    assert found.typical_error < 0.001
    assert found.software == {"torch": "2.13.0", "torchao": "0.18.0"}


def test_runs_that_say_nothing_of_one_run_are_left_out(tmp_path: Path) -> None:
    more = {
        "cases": [
            {"id": "tp2-tensorwise-v2048-f64", "verdict": verdict, "cpu_s": 999} for verdict in ("known", "hang")
        ],
        "witnesses": [
            {"name": f"{kind} {text}", "cpu_s": 999}
            for kind in ("solo with operands", "replayed partner", "reference", "replay")
            for text in [case_id(parse_case_id("single-tensorwise-v2048-f64"))]
        ],
    }
    with_more = fit_costs(report(tmp_path, **more), command="fit")
    without = fit_costs(report(tmp_path), command="fit")
    assert (with_more.case, with_more.solo) == (without.case, without.solo)


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="of each are needed"):
        fit_costs(report(tmp_path, first=12), command="fit")
