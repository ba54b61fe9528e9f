"""The float8 matmul of a device beside the exact one: torch's CPU kernel stands for that of a GPU, and passes.

Every wrong kernel is found, with the wide bound of a tensor core too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness.engine.cluster import unleased_cluster
from harness.plugins.gpu.kernel_checks import KernelCheck
from harness.plugins.gpu.kernels import (
    PROGRAM,
    Accumulator,
    KernelConclusion,
    reason_of,
    refusal_checks,
    run_checks,
    value_checks,
)
from harness.plugins.gpu.worker.kernels import observe
from harness.running.plan import parse_injection
from harness.studies.surviving import RanksFailed

FAULTS = Path(__file__).with_name("kernelfaults.py")
# torch's kernel of a CPU takes 0.3 s for sums of 1024 products, 1.5 s for those of 4096.
LONG = tuple(check for check in value_checks((10, 0)) if check.k == 1024 and check.out == "float32")
FEW = (*(check for check in value_checks((10, 0)) if check.k < 100), *LONG)
Run = Callable[..., dict[str, KernelConclusion]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run checks on the CPU, with a wrong kernel or without; conclusions by id."""
    with unleased_cluster(PROGRAM, 1) as cluster:

        def ask(
            checks: tuple[KernelCheck, ...], accumulator: Accumulator = "tensor_core", *, fault: str = ""
        ) -> dict[str, KernelConclusion]:
            planted = [parse_injection(f"{FAULTS}:{fault}").patch] if fault else []
            conclusions = run_checks(cluster, checks, device="cpu", accumulator=accumulator, injections=planted)
            return {conclusion.check.id: conclusion for conclusion in conclusions}

        yield ask


def kinds(conclusions: dict[str, KernelConclusion]) -> set[str]:
    return {problem.kind for conclusion in conclusions.values() for problem in conclusion.problems}


def test_the_kernel_of_a_cpu_adds_up_in_float32(run: Run) -> None:
    conclusions = run(FEW, "float32")
    assert (
        len(conclusions) == len(FEW) > 100
        and [name for name, conclusion in conclusions.items() if not conclusion.good] == []
    )
    sharp = [conclusion.error_of_sum / conclusion.allowed for conclusion in conclusions.values() if conclusion.allowed]
    assert 0 < max(sharp) < 0.5, "the bound is no guess and no measurement"


@pytest.mark.parametrize(
    ("fault", "kind", "only"),
    [
        ("dropped_scale", "bits", ""),
        ("dropped_scale", "error", "normal"),
        ("one_scale_for_all_rows", "bits", "rowwise"),
        ("swapped_rows", "bits", ""),
        ("swapped_rows", "error", "normal"),
        ("dropped_scale", "bits", "blocks"),
        ("scales_of_other_rows", "bits", "blocks"),
        ("scales_of_other_rows", "error", "blocks"),
        ("dropped_tail", "bits", ""),
        ("accumulated_in_bfloat16", "bits", "1024"),
        ("bias_before_the_scale", "bits", "bias"),
        ("without_nan", "nonfinite", "nan"),
        ("in_another_dtype", "shape", ""),
        ("refuses_e5m2", "refused", "e5m2"),
    ],
)
def test_a_wrong_kernel_is_found(run: Run, fault: str, kind: str, only: str) -> None:
    checks = tuple(check for check in FEW if only in check.id and (only or check not in LONG))
    assert kind in kinds(run(checks, fault=fault))


def test_a_sharper_accumulator_is_told_from_one_in_bfloat16_by_normal_values_too(run: Run) -> None:
    checks = tuple(check for check in FEW if check.values == "normal" and check.out == "float32")
    assert kinds(run(checks, "float32")) == set()
    assert kinds(run(checks, "float32", fault="accumulated_in_bfloat16")) == {"error"}


def test_a_check_that_kills_its_rank_is_lost_alone(run: Run) -> None:
    checks = tuple(check for check in value_checks((10, 0)) if check.k == 96 and check.out == "float16")
    bad = {
        name: conclusion
        for name, conclusion in run(checks, fault="dies_in_float16_with_a_bias").items()
        if not conclusion.good
    }
    assert kinds(bad) == {"lost"} and set(bad) == {check.id for check in checks if check.bias}
    assert "SIGABRT" in str(next(iter(bad.values())).problems[0])


def test_a_fault_outside_of_any_check_is_no_result(run: Run) -> None:
    with pytest.raises(RanksFailed, match="outside of any check"):
        run(FEW[:2], fault="cannot_be_planted")


@pytest.mark.parametrize(
    "check", dict.fromkeys((*refusal_checks((9, 0)), *refusal_checks((10, 0)))), ids=lambda check: check.id
)
def test_the_contract_refuses_for_a_known_reason(check: KernelCheck) -> None:
    seen = observe(check, torch.device("cpu"))
    assert reason_of(seen.refusal) != "unknown", seen.refusal
