"""Planted faults, part by part: every one is found, every rule has teeth, and no check fails in a clean run."""

from __future__ import annotations

from typing import get_args

import pytest

from harness.plugins.faults.mutation import MutationMatrix
from harness.running.executor import Executor
from tests.power.kills import (
    EAGER,
    IN_A_KNOWN_CASE,
    Part,
    aims,
    assert_all_found,
    assert_rules,
    faults_of,
    matrix_of,
    part_of,
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
