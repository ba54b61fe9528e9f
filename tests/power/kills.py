"""The kill matrix of some faults, each in the first of its carriers, and what every part of the matrix must show.

Slow for a test (every fault is a run on real ranks), and the reason to trust all others. `fp8-harness power` prints the
same matrix. It is spread over files, so that several workers share it.
"""

from __future__ import annotations

from pathlib import Path

from harness.matrix.faults import Fault, all_faults, carrier_kind, carriers_of
from harness.project import find_project
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.running.selection import Query
from harness.studies.kill_matrix import Power
from harness.studies.power import carriers_among, run_power

# Faults of class H are planted in compiled blocks, which take ten times as long as eager ones.
EAGER = tuple(fault for fault in all_faults().values() if fault.group != "H")
COMPILED = tuple(fault for fault in all_faults().values() if fault.group == "H")

# Those that need async TP, whose fused operators they change.
OF_ASYNC_TP = (
    "symmetric_memory_not_enabled fusion_pass_off scatters_not_recognized operand_taken_before_its_reshape "
    "scatter_dim_of_the_flat_operand output_shape_forgotten scattered_dim_not_moved_back scatter_averages "
    "row_scales_of_the_first_chunk gathered_chunks_swapped produced_chunks_swapped"
)


def on_one_rank(fault: Fault) -> bool:
    """True when the first carrier of the fault is a case of one rank."""
    (carrier,) = carriers_of(fault, at_most=1)
    return carrier_kind(carrier).layout == "one rank"


def kill_matrix(faults: tuple[Fault, ...], query: Query | None = None, root: Path | None = None) -> Power:
    """These faults, each in its first carrier among the cases of a query, and the carriers clean."""
    project = find_project(root)
    carriers = carriers_among(project, faults, query or Query(), at_most=1)
    return run_power(project, faults, carriers, make_plan(device="cpu"), SilentProgress())


def assert_all_found(power: Power) -> None:
    """Every fault that has an effect is found by a check, and no check fails in a clean run."""
    assert_found_in(power, not_reached=set(), not_planted=set())


def assert_found_in(power: Power, *, not_reached: set[str], not_planted: set[str]) -> None:
    """Every fault but these, and those without an effect, is found by a check; no check fails in a clean run."""
    assert {trial.case_id: trial.message for trial in power.false_positives} == {}
    assert {trial.fault: trial.message for trial in power.undetected} == {}
    assert {trial.fault for trial in power.not_reached} == not_reached
    assert power.not_planted.keys() == not_planted
    assert not power.interrupted


def assert_kills(power: Power, *, groups: str, checks: str) -> None:
    """Faults of exactly these classes are found, and each of these checks finds some."""
    caught = [trial for trial in power.trials if trial.detected]
    assert {trial.group for trial in caught} == set(groups)
    assert set(checks.split()) <= {check for trial in caught for check in trial.checks}
