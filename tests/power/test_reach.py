"""A fault that changes nothing in a case, or that cannot be planted in it, is told apart from one that was missed."""

from __future__ import annotations

import pytest

from harness.matrix.caseid import parse_case_id
from harness.plugins.faults.faults import fault_named
from harness.plugins.faults.mutation import NO_EFFECT, MutationMatrix, Trial, run_mutations
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress

CASE = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-s2-f64")
IDLE = "precompute_dead_branch"  # the case precomputes no scales
BROKEN = "weight_amax_over_replicas"  # the case has no replicas
SOUND = "amax_without_abs"


@pytest.fixture(scope="module")
def matrix(executor: Executor) -> MutationMatrix:
    faults = tuple(map(fault_named, (IDLE, BROKEN, SOUND)))
    hosts = {fault.name: [CASE] for fault in faults}
    plan = make_plan(device="cpu")
    return run_mutations(find_project(), faults, hosts, plan, SilentProgress(), executor=executor)


def trial_of(matrix: MutationMatrix, name: str) -> Trial:
    (trial,) = (trial for trial in matrix.trials if trial.fault == name)
    return trial


def test_a_fault_without_an_effect_or_with_an_error_of_its_own_is_told_from_one_that_reaches_the_case(
    matrix: MutationMatrix,
) -> None:
    assert trial_of(matrix, IDLE).not_reached == NO_EFFECT
    assert matrix.undetected == ()
    broken = trial_of(matrix, BROKEN)
    assert broken.not_reached.startswith("ValueError: ")
    assert not broken.detected
    assert trial_of(matrix, SOUND).detected
    assert {trial.fault for trial in matrix.not_reached} == {IDLE, BROKEN}
    assert matrix.unplantable == matrix.not_reached
