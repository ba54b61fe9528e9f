"""Faults of experts: every one is found in bfloat16, and no check fails in a clean run."""

from __future__ import annotations

from harness.studies.mutation import MutationMatrix
from tests.power.kills import assert_part, faults_of

FAULTS = faults_of("experts")
CHECKS = "routing parity local_parity traffic finite clipping resume"


def test_every_fault_is_found_and_no_clean_run_fails(matrix: MutationMatrix) -> None:
    assert len(FAULTS) >= 38
    assert_part(matrix, FAULTS, groups="K", checks=CHECKS)
