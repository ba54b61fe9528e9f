"""Faults of compiled blocks and async TP. Two in every run, all of them in the sweeps."""

from __future__ import annotations

import pytest

from harness.matrix.faults import fault_named
from tests.power.kills import COMPILED, assert_all_found, assert_checks, planted_matrix, short_matrix


def test_a_wrong_cast_and_a_wrong_row_are_found() -> None:
    faults = (fault_named("compiled_cast_clamps_early"), fault_named("gathered_chunks_swapped"))
    matrix = short_matrix(faults)
    assert_all_found(matrix)
    assert_checks(matrix, "graphs graph_scales")


@pytest.mark.sweep
def test_every_fault_is_found_and_no_clean_run_fails() -> None:
    matrix = planted_matrix(COMPILED)
    assert len(matrix.trials) >= 16
    assert_all_found(matrix)
    assert_checks(matrix, "graphs graph_scales traffic parity metamorphic")
