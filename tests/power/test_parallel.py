"""Faults that need several ranks: every one is found, and no check fails in a clean run."""

from __future__ import annotations

import pytest

from harness.studies.kill_matrix import Power
from tests.power.kills import EAGER, assert_all_found, assert_kills, kill_matrix, on_one_rank

FAULTS = tuple(fault for fault in EAGER if not on_one_rank(fault))


@pytest.fixture(scope="module")
def power() -> Power:
    return kill_matrix(FAULTS)


def test_every_fault_is_found_and_no_clean_run_fails(power: Power) -> None:
    assert len(power.trials) == len(FAULTS) >= 60
    assert_all_found(power)


def test_classes_and_checks(power: Power) -> None:
    assert_kills(power, groups="ABCDEFGI", checks="alignment loss_vs_golden parity scales traffic memory recompute")
