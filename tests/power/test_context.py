"""Faults of context parallelism: every one is found, and no check fails in a clean run."""

from __future__ import annotations

from harness.studies.mutation import MutationMatrix
from tests.power.kills import assert_part, faults_of

FAULTS = faults_of("context")
CHECKS = "parity divergence traffic memory tokens"


def test_every_fault_is_found_and_no_clean_run_fails(matrix: MutationMatrix) -> None:
    assert len(FAULTS) >= 16
    assert_part(matrix, FAULTS, groups="M", checks=CHECKS)
