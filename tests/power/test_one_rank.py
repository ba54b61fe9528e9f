"""Faults that one rank shows: every one is found, and no check fails in a clean run."""

from __future__ import annotations

from harness.studies.mutation import MutationMatrix
from tests.power.kills import assert_part, faults_of

FAULTS = faults_of("one rank")
CHECKS = "finite loss_vs_golden fp8_on matmuls parity scales recompute memory live_memory leaks"


def test_every_fault_is_found_and_no_clean_run_fails(matrix: MutationMatrix) -> None:
    assert len(FAULTS) >= 75
    assert_part(matrix, FAULTS, groups="ABCEFGIJ", checks=CHECKS)
