"""Planted faults, part by part: every one is found, every rule has teeth, and no check fails in a clean run.

The same over gloo, and a fault without an effect is told apart from one that was missed.
"""

from typing import get_args

import pytest

from harness.matrix.caseid import parse_case_id
from harness.plugins.faults.faults import all_faults, fault_named
from harness.plugins.faults.mutation import NO_EFFECT, MutationMatrix, Trial, hosts_among, run_mutations
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.running.selection import Query
from harness.verdict import Verdict
from tests.power.kills import (
    COMPILED,
    EAGER,
    IN_A_KNOWN_CASE,
    Part,
    aims,
    assert_all_found,
    assert_checks,
    assert_rules,
    faults_of,
    matrix_of,
    part_of,
    planted_matrix,
    short_matrix,
)

PARTS: tuple[Part, ...] = get_args(Part)


@pytest.mark.parametrize("part", PARTS)
def test_every_rule_that_a_fault_has_broken_is_broken_again(part: Part, executor: Executor) -> None:
    planted = {fault: aim for fault, aim in aims().items() if part_of(fault) == part}
    matrix = matrix_of({fault: aim.host for fault, aim in planted.items()}, executor)
    assert_found(matrix, len(planted))
    wanted = frozenset[str]().union(*(aim.rules for aim in planted.values()))
    assert wanted - {rule for trial in matrix.trials for rule in trial.rules} == frozenset()


@pytest.mark.sweep  # 300 runs
@pytest.mark.parametrize("part", PARTS)
def test_every_fault_is_found(part: Part, executor: Executor) -> None:
    faults = faults_of(part)
    assert_found(short_matrix(faults, executor), len(faults))


def test_every_fault_belongs_to_a_part() -> None:
    assert sum(len(faults_of(part)) for part in PARTS) + len(IN_A_KNOWN_CASE) == len(EAGER) >= 311


def assert_found(matrix: MutationMatrix, faults: int) -> None:
    assert len(matrix.trials) == faults
    assert_all_found(matrix)
    assert_rules(matrix)


@pytest.mark.sweep
def test_every_fault_is_found_and_no_clean_run_fails() -> None:
    matrix = planted_matrix(COMPILED)
    assert len(matrix.trials) >= 16
    assert_all_found(matrix)
    assert_checks(matrix, "graphs graph_scales traffic parity metamorphic")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("tp2-tensorwise-v2048-gb4-s2-f64", "sequence_shards_swapped amax_not_reduced_over_tp nothing_converted"),
        # float32 sums of more than two ranks have other bits here than in the reference of one rank
        ("fsdp3-tensorwise-v2048-gb6-s2-f32", "gathered_shards_swapped one_gradient_lost"),
        ("fsdp4-tensorwise-ag.fp8pre-v2048-gb4-s2-f32", "gathered_shards_swapped one_gradient_lost"),
        ("fsdp4-tensorwise-ag.fp8pre-v2048-gb4-s2-b16", "gathered_shards_swapped one_gradient_lost"),
        ("tp4-rowwise-ac.full-v2048-gb4-s2-b16", "partial_output_not_reduced output_kept_on_module"),
    ],
)
def test_faults_are_found_and_the_clean_run_passes(executor: Executor, host: str, names: str) -> None:
    project, faults = find_project(), tuple(all_faults()[name] for name in names.split())
    hosts = hosts_among(project, faults, Query(sources=(host,)), at_most=1)
    plan = make_plan(device="cpu", backend="gloo")
    matrix = run_mutations(project, faults, hosts, plan, SilentProgress(), executor=executor)
    assert len(matrix.trials) == len(faults)
    assert_all_found(matrix)


def test_faults_are_found_under_composable_replicate(executor: Executor) -> None:
    host = parse_case_id("replicate2-blockwise-v2048-gb16-s2-b16")
    faults = tuple(map(fault_named, ("replicas_not_reduced", "update_missing_on_one_rank", "slice_scales_in_bfloat16")))
    hosts = {fault.name: [host] for fault in faults}
    plan = make_plan(device="cpu")
    matrix = run_mutations(find_project(), faults, hosts, plan, SilentProgress(), executor=executor)
    assert [trial.detected for trial in matrix.trials] == [True] * 3
    assert [trial.verdict for trial in matrix.clean] == [Verdict.PASSED]


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
