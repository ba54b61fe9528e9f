"""What runs find stays: the verdicts of cases, and the rules that find every planted fault.

Both are long. `frozen_pr.txt` holds cases that pr had before findings had rules, with the number of checks that judged
them; the mutation matrix is the one that `fp8-harness dev mutate --record` stored.
"""

from pathlib import Path

import pytest

from harness import workflow
from harness.plugins.faults.faults import all_faults
from harness.plugins.faults.kills import read_kills
from harness.plugins.faults.mutation import hosts_among, recorded_kills, run_mutations
from harness.project import STATE_VARIABLE, find_project
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.running.selection import Query
from tests.power.kills import assert_named

STORED = Path(__file__).parents[1] / "frozen_pr.txt"


@pytest.mark.sweep
def test_the_verdicts_of_cases_are_those_that_were_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    stored = [line.split() for line in STORED.read_text().splitlines()]
    query = Query(sources=tuple(name for name, _, _ in stored))
    run, _ = workflow.run(find_project(), query, make_plan(device="cpu"), SilentProgress())
    judged = {result.case_id: (result.verdict.value, len(result.checks)) for result in run.results}
    for name, verdict, checks in stored:
        assert judged[name][0] == verdict and judged[name][1] >= int(checks), name


@pytest.mark.sweep
def test_every_fault_is_found_by_the_rules_that_found_it_when_it_was_recorded() -> None:
    project, faults = find_project(), tuple(all_faults().values())
    hosts = hosts_among(project, faults, Query(), at_most=2)
    matrix = run_mutations(project, faults, hosts, make_plan(device="cpu"), SilentProgress())
    recorded = read_kills(project.root)
    assert recorded is not None and not matrix.undetected and not matrix.false_positives
    assert recorded_kills(matrix).found == recorded.found
    assert_named(matrix)
    assert matrix.scores == recorded.scores
