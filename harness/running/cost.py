"""The cost of one case on this machine, before it runs: what was measured here, else what costs and formulas say."""

from __future__ import annotations

import os

import msgspec

from harness.evidence.costs import read_costs
from harness.evidence.estimate import FLOPS_PER_CPU_S, Estimate, estimate
from harness.evidence.tolerance import ToleranceMissing, parity_tolerance_for, tolerance_for
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, parameter_count
from harness.matrix.rules import expected_refusal
from harness.project import Project
from harness.result import CaseResult
from harness.running.budget import START_S, relative_speed
from harness.store import RunStore

_DERIVING = "no tolerance was measured for cases like this: it is derived, from five more BF16 runs on one rank"
_DERIVING_SHARE = 3.0  # of the CPU seconds of the case: measured with 15 million parameters on two ranks


class ExpectedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on so many CPUs, CPU seconds, bytes of the largest process and of all at once; `basis`: where from."""

    wall_s: float
    cpus: int
    case_cpu_s: float
    witness_cpu_s: float
    process_bytes: float
    all_bytes: float
    basis: tuple[str, ...]


def expected_cost(project: Project, case: Case) -> ExpectedCost:
    """What the case will need here. Raises `CostsDamaged` in a project without stored costs."""
    costs, cpus = read_costs(project.root), len(os.sched_getaffinity(0))
    found, speed = estimate(case, costs), relative_speed(project, costs)
    measured = _measured(project, case)
    case_cpu_s = measured.cpu_s if measured is not None else found.case_cpu_s * speed
    derives = _derives_a_tolerance(project, case)
    witness_cpu_s = found.witness_cpu_s * speed + derives * _DERIVING_SHARE * case_cpu_s
    busy = min(cpus, case.world_size)
    wall_s = START_S + (case_cpu_s / busy if measured is None else measured.seconds) + witness_cpu_s
    source = (
        f"measured: the CPU seconds of the case, in its last run here ({measured.seconds:.1f} s wall)"
        if measured is not None
        else f"estimated: from {costs.cases_fitted} cases measured on {costs.cpu} (typical error "
        f"{costs.typical_error:.0%}), times {speed:.2g} for this machine"
    )
    return ExpectedCost(
        wall_s=wall_s,
        cpus=cpus,
        case_cpu_s=case_cpu_s,
        witness_cpu_s=witness_cpu_s,
        process_bytes=found.process_bytes,
        all_bytes=found.all_bytes,
        basis=(source, *_assumptions(case, found), *[_DERIVING] * derives),
    )


def _derives_a_tolerance(project: Project, case: Case) -> bool:
    """True when none was measured for cases like this."""
    if expected_refusal(case) is not None:
        return False
    try:
        tolerance_for(case, project.root)
        parity_tolerance_for(case, project.root)
    except ToleranceMissing:
        return True
    return False


def _assumptions(case: Case, found: Estimate) -> tuple[str, ...]:
    memory = "estimated: memory, from the sizes of parameters, optimizer, saved tensors and records"
    if not found.rough:
        return (memory,)
    size, rate = f"{parameter_count(case) / 1e6:.0f} million parameters", f"{FLOPS_PER_CPU_S / 1e9:.0f} GFLOP"
    work = f"{rate} per CPU second, {FLOPS_PER_PARAMETER_AND_TOKEN} FLOP per parameter and token"
    return (f"rough: {size} are more than was measured; assumed: {work}", memory)


def _measured(project: Project, case: Case) -> CaseResult | None:
    """The last result of the case here that took time."""
    name = case_id(case)
    found = (RunStore(folder).result_of(name) for folder in reversed(project.stored_runs()))
    return next((result for result in found if result is not None and result.cpu_s), None)
