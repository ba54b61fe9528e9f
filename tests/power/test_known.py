"""A fault planted into a case with a recorded upstream fault is never `known`: the run with the fix has every sight."""

from __future__ import annotations

import pytest

from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import fault_named
from harness.project import find_project
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.studies.kill_matrix import Power
from harness.studies.power import run_power
from harness.verdict import Verdict

KNOWN = [
    parse_case_id("fsdp3-tensorwise-ag.fp8-v2048-gb6-s2-f64"),  # crashes without its fix
    parse_case_id("fsdp2-tp2-tensorwise-ag.fp8-v2048-s3-f64"),  # wrong scales without its fix
]
FAULTS = ["one_gradient_lost", "gradients_doubled", "gradient_cast_to_e4m3", "update_missing_on_one_rank"]


@pytest.fixture(scope="module")
def power() -> Power:
    faults = tuple(map(fault_named, FAULTS))
    carriers = {fault.name: KNOWN for fault in faults}
    return run_power(find_project(), faults, carriers, make_plan(device="cpu"), SilentProgress())


def test_the_cases_are_known_without_a_fault(power: Power) -> None:
    assert [trial.verdict for trial in power.clean] == [Verdict.KNOWN] * len(KNOWN)


def test_no_fault_hides_behind_a_recorded_one(power: Power) -> None:
    assert len(power.trials) == len(FAULTS) * len(KNOWN)
    assert [(trial.fault, trial.case_id) for trial in power.trials if not trial.detected] == []
