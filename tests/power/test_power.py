"""The kill matrix stays honest: every planted fault is found by a check, and no check cries in a clean run.

Slow for a test (every fault is a run on real ranks), and the reason to trust all others. `fp8-harness power` prints the
same matrix.
"""

from __future__ import annotations

import pytest

from harness.matrix.faults import all_faults
from harness.project import find_project
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.studies.kill_matrix import Power
from harness.studies.power import carriers_among, run_power

# Faults that no check finds yet, each with the reason. A name that is found must leave this list.
ESCAPING: dict[str, str] = {}


@pytest.fixture(scope="module")
def power() -> Power:
    project, faults = find_project(), tuple(all_faults().values())
    carriers = carriers_among(project, faults, None, at_most=1)
    return run_power(project, faults, carriers, make_plan(device="cpu"), SilentProgress())


def test_no_check_cries_in_a_clean_run(power: Power) -> None:
    assert len(power.clean) >= 12
    assert {trial.case_id: trial.message for trial in power.false_positives} == {}


def test_every_fault_that_must_be_found_is_found(power: Power) -> None:
    required = [trial for trial in power.trials if not trial.equivalent]
    assert len({trial.fault for trial in required}) >= 90
    assert {trial.fault for trial in power.undetected} == set(ESCAPING)


def test_every_class_and_every_judging_check_has_kills(power: Power) -> None:
    caught = [trial for trial in power.trials if trial.detected]
    assert {trial.group for trial in caught} == set("ABCDEFGHI")
    checks = {check for trial in caught for check in trial.checks}
    judging = "finite loss_vs_golden fp8_on matmuls alignment parity scales traffic memory graphs"
    assert set(judging.split()) <= checks
