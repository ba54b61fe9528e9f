"""Faults of compiled blocks and async TP. One in every run, all of them in the sweeps."""

from __future__ import annotations

import pytest

from harness.matrix.faults import fault_named
from tests.power.kills import COMPILED, assert_all_found, assert_checks, planted_matrix, short_matrix


def test_a_wrong_cast_is_found() -> None:
    """Wrong rows of fused operators are those of a live fault in `tests/worker/test_compiled.py`."""
    matrix = short_matrix([fault_named("compiled_cast_clamps_early")])
    assert_all_found(matrix)
    assert_checks(matrix, "graph_scales")


@pytest.mark.sweep
def test_every_fault_is_found_and_no_clean_run_fails() -> None:
    matrix = planted_matrix(COMPILED)
    assert len(matrix.trials) >= 16
    assert_all_found(matrix)
    assert_checks(matrix, "graphs graph_scales traffic parity metamorphic")
