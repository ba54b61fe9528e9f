"""The cost of one case on this machine, before it runs: what was measured here, else what costs and formulas say."""

import statistics
from collections.abc import Sequence

import msgspec

from harness.engine.hardware import usable_cpus
from harness.evidence.costs import FLOPS_PER_CPU_S, Costs, Estimate, estimate, read_costs
from harness.evidence.tolerance import ToleranceMissing, parity_tolerance_for, tolerance_for
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.choice import Budgeted, planted_faults, within_budget
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, parameter_count
from harness.matrix.rules import expected_refusal
from harness.matrix.tier import Selection
from harness.project import Project
from harness.result import CaseResult
from harness.running.selection import NothingSelected
from harness.store import RunStore
from harness.verdict import Verdict

_DERIVING = "no tolerance was measured for cases like this: it is derived, from five more BF16 runs on one rank"
_DERIVING_SHARE = 3.0  # of the CPU seconds of the case: measured with 15 million parameters on two ranks

START_S = 12.0  # until the zygote is warm
_BUSY = 0.9  # share of the CPUs that a run keeps busy
_FEWEST = 5  # measured cases below which earlier runs say nothing about the speed of this machine


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
    """What the case will need here. Raises `Damaged` where the stored costs are."""
    costs, cpus = read_costs(project.root), usable_cpus()
    estimated, speed = estimate(case, costs), relative_speed(project, costs)
    measured = _measured(project, case)
    case_cpu_s = measured.cpu_s if measured is not None else estimated.case_cpu_s * speed
    derives = _derives_a_tolerance(project, case)
    witness_cpu_s = estimated.witness_cpu_s * speed + derives * _DERIVING_SHARE * case_cpu_s
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
        process_bytes=estimated.process_bytes,
        all_bytes=estimated.all_bytes,
        basis=(source, *_assumptions(case, estimated), *[_DERIVING] * derives),
    )


def _derives_a_tolerance(project: Project, case: Case) -> bool:
    if expected_refusal(case) is not None:
        return False
    try:
        tolerance_for(case, project.root)
        parity_tolerance_for(case, project.root)
    except ToleranceMissing:
        return True
    return False


def _assumptions(case: Case, estimated: Estimate) -> tuple[str, ...]:
    memory = "estimated: memory, from the sizes of parameters, optimizer, saved tensors and records"
    if not estimated.rough:
        return (memory,)
    size, rate = f"{parameter_count(case) / 1e6:.0f} million parameters", f"{FLOPS_PER_CPU_S / 1e9:.0f} GFLOP"
    work = f"{rate} per CPU second, {FLOPS_PER_PARAMETER_AND_TOKEN} FLOP per parameter and token"
    return (f"rough: {size} are more than was measured; assumed: {work}", memory)


def _measured(project: Project, case: Case) -> CaseResult | None:
    name = case_id(case)
    results = (RunStore(path).result_of(name) for path in reversed(project.stored_runs()))
    return next((result for result in results if result is not None and result.cpu_s), None)


def cases_within(project: Project, cases: Sequence[Case], selections: Sequence[Selection], budget_s: float) -> Budgeted:
    """The cases to run in `budget_s` seconds of wall clock. Raises `NothingSelected` when not even one fits."""
    costs = read_costs(project.root)
    cpus = usable_cpus()
    budget_cpu_s = max(0.0, budget_s - START_S) * cpus * _BUSY / relative_speed(project, costs)
    budgeted = within_budget(cases, selections, costs.price, faults=planted_faults(), budget_cpu_s=budget_cpu_s)
    if not budgeted.cases:
        raise NothingSelected(
            f"no case fits into {budget_s:g} s, of which {START_S:g} s are for starting.",
            where="--budget-s",
            fix="give more seconds.",
        )
    return budgeted


def relative_speed(project: Project, costs: Costs) -> float:
    """CPU seconds that cases took here, by the last stored run, per second that the costs say; 1 where none tells."""
    for path in reversed(project.stored_runs()):
        ratios = [
            result.cpu_s / costs.case_s(parse_case_id(result.case_id))
            for result in RunStore(path).read().results
            if result.verdict is Verdict.PASSED and result.expectation is None and result.cpu_s
        ]
        if len(ratios) >= _FEWEST:
            return statistics.median(ratios)
    return 1.0
