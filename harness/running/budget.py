"""`--budget-s`: from seconds on this machine to the best part of a selection.

Owns what a second is worth here: how many CPUs there are, and how fast they were in earlier runs of this project.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from harness.evidence.costs import Costs, read_costs
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import all_faults
from harness.matrix.parts import Budgeted, within_budget
from harness.matrix.tier import Selection
from harness.project import Project
from harness.running.selection import NothingSelected
from harness.store import RunStore
from harness.verdict import Verdict

START_S = 12.0  # until the zygote is warm
_BUSY = 0.9  # share of the CPUs that a run keeps busy
_FEWEST = 5  # measured cases below which earlier runs say nothing about the speed of this machine


def cases_within(project: Project, cases: Sequence[Case], selections: Sequence[Selection], budget_s: float) -> Budgeted:
    """The cases to run in `budget_s` seconds of wall clock. Raises `NothingSelected` when not even one fits."""
    costs = read_costs(project.root)
    cpus = len(os.sched_getaffinity(0))
    budget_cpu_s = max(0.0, budget_s - START_S) * cpus * _BUSY / relative_speed(project, costs)
    found = within_budget(cases, selections, costs.price, faults=all_faults().values(), budget_cpu_s=budget_cpu_s)
    if not found.cases:
        raise NothingSelected(
            f"no case fits into {budget_s:g} s, of which {START_S:g} s are for starting.",
            where="--budget-s",
            fix="give more seconds.",
        )
    return found


def relative_speed(project: Project, costs: Costs) -> float:
    """CPU seconds that cases took here, by the last stored run, per second that the costs say; 1 where none tells."""
    for folder in reversed(project.stored_runs()):
        ratios = [
            result.cpu_s / costs.case_s(parse_case_id(result.case_id))
            for result in RunStore(folder).read().results
            if result.verdict is Verdict.PASSED and result.expectation is None and result.cpu_s
        ]
        if len(ratios) >= _FEWEST:
            return statistics.median(ratios)
    return 1.0
