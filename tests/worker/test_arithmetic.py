"""What multiplies float8 is what was asked for: torch's kernel or the exact one, on any device."""

from __future__ import annotations

import pytest
import torch

from harness.checks.check import Witnesses
from harness.checks.fp8_on import FOREIGN_PARTS, check_fp8_on
from harness.engine.zygote_engine import ZygoteEngine
from harness.expect.expectations import Expectations
from harness.matrix.caseid import parse_case_id
from harness.plugins.gpu.levels import ask_torch
from harness.request import RunRequest
from harness.trace import RankTrace
from harness.verdict import Finding
from harness.worker.virtual import device
from tests.builders import run_of
from tests.jobs import run_request, traces_of
from tests.worker.conftest import Train

CASE = parse_case_id("single-rowwise-layers.1-v2048-gb1-sl16-s1-b16")  # small: torch's kernel of a CPU is slow


@pytest.fixture(scope="module")
def by_kernel(tmp_path_factory: pytest.TempPathFactory) -> RankTrace:
    """The case on ranks whose zygote left torch's kernel where it is."""
    options = {"device": "cpu", "arithmetic": "kernel"}
    with ZygoteEngine("harness.worker.main", options) as engine:
        request = RunRequest(case=CASE, arithmetic="kernel")
        (trace,) = traces_of(run_request(engine, tmp_path_factory.mktemp("job"), request))
    return trace


def findings(trace: RankTrace) -> list[Finding]:
    return check_fp8_on(CASE, run_of(trace), Witnesses(expect=Expectations(CASE)))


def test_the_kernel_of_the_device_trains_and_is_not_the_exact_one(by_kernel: RankTrace, train: Train) -> None:
    (exact,) = train(CASE)
    assert (by_kernel.arithmetic, exact.arithmetic) == ("kernel", "exact")
    assert "scaled_mm" in exact.virtual and "scaled_mm" not in by_kernel.virtual
    assert findings(by_kernel) == findings(exact) == []
    for mine, other in zip(by_kernel.steps, exact.steps, strict=True):
        assert mine.scaled_mm_calls == other.scaled_mm_calls > 0
        assert mine.loss == pytest.approx(other.loss, abs=1e-3)


def test_an_exact_matmul_that_was_not_asked_for_is_found(train: Train) -> None:
    (trace,) = train(CASE, arithmetic="kernel")  # from a zygote that has the exact one
    (finding,) = findings(trace)
    assert (finding.rule, finding.values["device"], finding.ranks) == (FOREIGN_PARTS.name, "cpu", (0,))


def test_torch_is_asked_about_devices_in_a_process_that_ends() -> None:
    facts = ask_torch()
    assert facts.torch == torch.__version__ and facts.cuda == (torch.version.cuda or "")
    assert len(facts.devices) == (torch.cuda.device_count() if facts.cuda else 0)


def test_cuda_gets_the_exact_matmul_and_nothing_else_where_it_is_asked_for() -> None:
    before = set(device.install("nccl", device="cuda", arithmetic="kernel"))
    assert set(device.install("nccl", device="cuda", arithmetic="exact")) == before | {"scaled_mm"}
    for name in ("aten::_scaled_mm", "aten::_scaled_mm.out"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
