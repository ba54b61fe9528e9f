"""A fault planted into a case with a recorded upstream fault is never `known`: its run is judged with the fix."""

from collections.abc import Mapping, Sequence

import pytest

from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.plugins.faults.faults import fault_named
from harness.plugins.faults.mutation import MutationMatrix, run_mutations
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.verdict import Verdict
from tests.power.kills import IN_A_KNOWN_CASE, short_host

CRASHES = parse_case_id("fsdp3-tensorwise-ag.fp8-v2048-gb6-s2-f64")  # without its fix
WRONG_SCALES = parse_case_id("fsdp2-tp2-tensorwise-ag.fp8-v2048-s2-f64")  # without its fix
FAULTS = ("one_gradient_lost", "gradients_doubled", "gradient_cast_to_e4m3", "update_missing_on_one_rank")
IN_A_CRASH = ("gradient_cast_to_e4m3",)  # of FP8; the sweeps plant all


def planted(faults: Mapping[Case, Sequence[str]], executor: Executor | None = None) -> MutationMatrix:
    names = dict.fromkeys(name for of_case in faults.values() for name in of_case)
    hosts = {name: [case for case, of_case in faults.items() if name in of_case] for name in names}
    plan = make_plan(device="cpu")
    chosen = tuple(map(fault_named, names))
    return run_mutations(find_project(), chosen, hosts, plan, SilentProgress(), executor=executor)


@pytest.mark.parametrize(
    ("case", "faults", "clean"),
    [
        pytest.param(CRASHES, IN_A_CRASH, Verdict.PASSED, id="crash"),  # with its fix
        # four ranks that train twice
        pytest.param(WRONG_SCALES, IN_A_KNOWN_CASE, Verdict.KNOWN, id="wrong scales", marks=pytest.mark.sweep),
    ],
)
def test_no_fault_hides_behind_a_recorded_one(
    executor: Executor, case: Case, faults: Sequence[str], clean: Verdict
) -> None:
    matrix = planted({case: faults}, executor)
    assert {trial.case_id: trial.verdict for trial in matrix.clean} == {case_id(case): clean}
    assert len(matrix.trials) == len(faults)
    assert [(trial.fault, trial.case_id) for trial in matrix.trials if not trial.detected] == []
    assert [(trial.name, trial.misnamed) for trial in matrix.misnamed] == []


def test_faults_whose_carrier_is_known_are_planted_in_it() -> None:
    assert {short_host(fault_named(name)) for name in IN_A_KNOWN_CASE} == {WRONG_SCALES}


@pytest.mark.sweep
@pytest.mark.parametrize("case", [CRASHES, WRONG_SCALES], ids=["crash", "wrong scales"])
def test_no_other_fault_hides_there(case: Case) -> None:
    matrix = planted({case: FAULTS})
    assert len(matrix.trials) == len(FAULTS)
    assert [trial.fault for trial in matrix.trials if not trial.detected] == []
