"""Faults that one rank shows: every one is found, and no check fails in a clean run."""

from __future__ import annotations

import pytest

from harness.running.executor import Executor
from harness.studies.kill_matrix import Power
from tests.power.kills import assert_all_found, assert_kills, faults_of, short_kill_matrix

FAULTS = faults_of("one rank")


@pytest.fixture(scope="module")
def power(executor: Executor) -> Power:
    return short_kill_matrix(FAULTS, executor)


def test_every_fault_is_found_and_no_clean_run_fails(power: Power) -> None:
    assert len(power.trials) == len(FAULTS) >= 75
    assert_all_found(power)


def test_classes_and_checks(power: Power) -> None:
    checks = "finite loss_vs_golden fp8_on matmuls parity scales recompute memory live_memory leaks"
    assert_kills(power, groups="ABCEFGI", checks=checks)
