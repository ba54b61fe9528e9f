"""A fault that changes nothing in a case, or that cannot be planted in it, is told apart from one that was missed."""

from __future__ import annotations

import pytest

from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import fault_named
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.studies.kill_matrix import Power, Trial
from harness.studies.power import run_power
from harness.studies.reach import NO_EFFECT

CASE = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-s2-f64")
IDLE = "precompute_dead_branch"  # the case precomputes no scales
BROKEN = "weight_amax_over_replicas"  # the case has no replicas
SOUND = "amax_without_abs"


@pytest.fixture(scope="module")
def power(executor: Executor) -> Power:
    faults = tuple(map(fault_named, (IDLE, BROKEN, SOUND)))
    carriers = {fault.name: [CASE] for fault in faults}
    plan = make_plan(device="cpu")
    return run_power(find_project(), faults, carriers, plan, SilentProgress(), executor=executor)


def trial_of(power: Power, name: str) -> Trial:
    (found,) = (trial for trial in power.trials if trial.fault == name)
    return found


def test_a_run_like_the_clean_one_is_no_miss(power: Power) -> None:
    assert trial_of(power, IDLE).not_reached == NO_EFFECT
    assert power.undetected == ()


def test_an_error_of_the_fault_itself_is_no_detection(power: Power) -> None:
    broken = trial_of(power, BROKEN)
    assert broken.not_reached.startswith("ValueError: ")
    assert not broken.detected


def test_a_fault_that_reaches_the_case_is_judged(power: Power) -> None:
    assert trial_of(power, SOUND).detected
    assert {trial.fault for trial in power.not_reached} == {IDLE, BROKEN}
    assert power.unplantable == power.not_reached
