"""Faults that TP shows: every one is found, and no check fails in a clean run."""

from __future__ import annotations

from harness.studies.mutation import MutationMatrix
from tests.power.kills import assert_all_found, assert_kills, faults_of

FAULTS = faults_of("TP")


def test_every_fault_is_found_and_no_clean_run_fails(matrix: MutationMatrix) -> None:
    assert len(matrix.trials) == len(FAULTS) >= 15
    assert_all_found(matrix)


def test_classes_and_checks(matrix: MutationMatrix) -> None:
    assert_kills(matrix, groups="ACDEFG", checks="alignment loss_vs_golden parity scales traffic memory")
