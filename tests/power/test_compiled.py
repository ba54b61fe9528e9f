"""Faults of compiled blocks and async TP, in the sweeps: `tests/worker/test_compiled.py` has some in every run."""

from __future__ import annotations

import pytest

from tests.power.kills import COMPILED, assert_all_found, assert_checks, planted_matrix


@pytest.mark.sweep
def test_every_fault_is_found_and_no_clean_run_fails() -> None:
    matrix = planted_matrix(COMPILED)
    assert len(matrix.trials) >= 16
    assert_all_found(matrix)
    assert_checks(matrix, "graphs graph_scales traffic parity metamorphic")
