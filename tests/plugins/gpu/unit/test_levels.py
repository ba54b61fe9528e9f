"""The levels of evidence: what devices can prove, by fake facts; what is stored, told, and found to have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.engine.hardware import Capacity, NodeCapacity
from harness.engine.leases import Leases
from harness.errors import HarnessError
from harness.evidence.golden import list_goldens
from harness.evidence.sealed import Damaged
from harness.evidence.verified import LEVELS, Level
from harness.plugins.faults.faults import all_faults
from harness.plugins.faults.mutation import MutationMatrix
from harness.plugins.gpu.commands import possible_levels
from harness.plugins.gpu.kernel_checks import KernelCheck, KernelObservation
from harness.plugins.gpu.kernels import allowed_of_sum, conclude, reason_of, refusal_checks, value_checks
from harness.plugins.gpu.levels import chosen_cases, default_faults, doubts, items_of, memory_words, obstacle
from harness.plugins.gpu.record import (
    DeviceFacts,
    LevelItem,
    LevelReport,
    TorchFacts,
    changes,
    level_line,
    level_path,
    level_section,
    list_levels,
    read_level,
    write_level,
)
from harness.project import Project
from harness.report.sections import markdown
from harness.result import Environment
from harness.running.plan import Plan
from harness.running.selection import Query
from harness.verdict import Verdict
from tests.plugins.faults.unit.test_mutation import make_trial

GIB = 1 << 30
PASSED: dict[str, Any] = {"verdict": Verdict.PASSED, "rules": ()}


def device(index: int = 0, *, capability: tuple[int, int] = (9, 0), free: int = 80, name: str = "H100") -> DeviceFacts:
    return DeviceFacts(index=index, name=name, capability=capability, total_bytes=80 * GIB, free_bytes=free * GIB)


def facts(*devices: DeviceFacts, cuda: str = "13.0", nccl: str = "2.28.9", error: str = "") -> TorchFacts:
    return TorchFacts(torch="2.13.0", cuda=cuda, nccl=nccl, devices=devices, error=error)


TWO = facts(device(0), device(1))
OLD = facts(device(0, capability=(8, 0), name="A100"), device(1, capability=(8, 0), name="A100"))


@pytest.mark.parametrize("words", [(), ("smoke",)])
def test_a_project_without_tiers_is_proven_by_those_of_the_package(project: Project, words: tuple[str, ...]) -> None:
    plan = Plan(capacity=Capacity(nodes=(NodeCapacity(host="here", slots=2, device="cpu", device_name="cpu"),)))
    cases, left_out = chosen_cases("proof", project, Query(sources=words), plan)
    assert cases and all(case.train.dtype == "float64" and case.world_size <= 2 for case in cases)
    assert left_out and "need more than 2 devices" in left_out[0]


@pytest.mark.parametrize(
    ("level", "here", "visible", "words"),
    [
        ("kernel", facts(device()), 1, ""),
        ("native", facts(device()), 1, ""),
        ("proof", TWO, 2, ""),
        ("proof", OLD, 2, ""),  # the exact matmul needs no float8 hardware
        ("kernel", OLD, 2, r"compute capability 8.9; too old: GPU 0 \(A100, 8.0\), GPU 1 .*Fix: leave these out"),
        ("native", OLD, 2, "too old"),
        ("kernel", facts(device(capability=(8, 9))), 1, ""),
        ("proof", facts(device()), 1, "needs 2 GPUs, and 1 can be used"),
        ("proof", TWO, 1, "needs 2 GPUs, and 1 can be used"),
        ("kernel", TorchFacts(torch="2.13.0+cpu"), 1, r"torch 2.13.0\+cpu was built without CUDA.*Fix: install"),
        ("kernel", facts(error="The NVIDIA driver on your system is too old"), 1, "driver on your system is too old"),
        ("kernel", facts(), 1, "it counts none"),
        ("proof", facts(device(0), device(1), nccl=""), 2, "built without NCCL"),
        ("native", facts(device(), nccl=""), 1, "built without NCCL"),
        ("kernel", facts(device(), nccl=""), 1, ""),  # one process, no collectives
    ],
)
def test_what_stands_against_a_level(level: Level, here: TorchFacts, visible: int, words: str) -> None:
    error = obstacle(level, here, visible)
    if not words:
        assert error is None
        return
    assert error is not None and error.fix and error.where == f"evidence {level}"
    with pytest.raises(type(error), match=words):
        raise error


@pytest.mark.parametrize(
    ("here", "visible", "possible", "said"),
    [
        (facts(device()), 1, ["kernel", "native"], "evidence proof: it needs 2 GPUs"),
        (OLD, 2, ["proof"], "evidence native: float8 matmuls need"),
        (TWO, 2, ["kernel", "proof", "native"], ""),
        (None, 1, ["kernel", "proof", "native"], ""),
    ],
)
def test_of_all_levels_those_that_can_be_are_tried_and_the_others_named(
    capsys: pytest.CaptureFixture[str], here: TorchFacts | None, visible: int, possible: list[Level], said: str
) -> None:
    assert possible_levels(LEVELS, here, visible) == possible
    printed = capsys.readouterr().err
    assert said in printed and printed.count("note:") == 3 - len(possible)
    with pytest.raises(HarnessError, match="without CUDA"):
        possible_levels(LEVELS, TorchFacts(torch="2.13.0+cpu"), 1)


def test_what_makes_numbers_less_certain_is_told() -> None:
    assert doubts(TWO, ()) == ()
    used, leased, mixed = doubts(facts(device(0, free=60), device(1, name="H200")), ("1",))
    assert used.startswith("GPU 0: 20 GiB of 80 GiB are in use by others") and "GPU 1 is leased" in leased
    assert "H100, H200" in mixed and memory_words(TWO)[1] == "GPU 1 H100, 80 GiB"


def test_slots_that_a_job_holds_are_seen(tmp_path: Path) -> None:
    leases = Leases(tmp_path, 3)
    assert leases.held_slots() == ()
    with leases.acquire(2) as slots:
        assert Leases(tmp_path, 3).held_slots() == slots
        with leases.acquire(1):
            assert Leases(tmp_path, 3).held_slots() == (0, 1, 2)
    assert leases.held_slots() == ()


REPORT = LevelReport(
    level="kernel",
    hardware="nvidia-h100",
    items=(
        LevelItem(name="a", verdict="passed", good=True, numbers={"error_of_sum": 2e-5, "allowed": 1e-2}),
        LevelItem(name="b", verdict="passed", good=True, numbers={"error_of_sum": 1e-7, "allowed": 1e-3}),
    ),
    notes=("refusals: none",),
    environment=Environment(packages={"torch": "2.13.0"}, device="NVIDIA H100", driver="580.1", commit="abc"),
    devices=1,
    memory=("GPU 0 NVIDIA H100, 80 GiB",),
    variables={"NCCL_ALGO": "Ring"},
    command="fp8-harness dev evidence kernel --device cuda",
    created="2026-01-01T00:00:00Z",
    seconds=12.0,
)


def test_what_is_stored_is_read_and_is_no_golden(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    assert read_level(tmp_path, "nvidia-h100", "kernel") is None and list_levels(tmp_path) == ()
    path = write_level(tmp_path, REPORT)
    stored = read_level(tmp_path, "nvidia-h100", "kernel")
    assert stored is not None and changes(stored, REPORT) == ()
    assert list_levels(tmp_path) == (("nvidia-h100", "kernel"),) and list_goldens(tmp_path) == ()
    path.write_text(path.read_text().replace('"NCCL_ALGO": "Ring"', '"NCCL_ALGO": "Tree"'))
    with pytest.raises(Damaged, match="was changed after"):
        read_level(tmp_path, "nvidia-h100", "kernel")
    level_path(tmp_path, "nvidia-h100", "kernel").write_text("{")
    with pytest.raises(Damaged, match="not readable"):
        read_level(tmp_path, "nvidia-h100", "kernel")


def test_what_changed_is_told_and_nothing_else() -> None:
    worse = LevelItem(name="a", verdict="failed", good=False, numbers={"error_of_sum": 5e-5}, says=("error: …",))
    close = LevelItem(name="b", verdict="passed", good=True, numbers={"error_of_sum": 1.9e-7})
    more = LevelItem(name="c", verdict="passed", good=True)
    newer = replace(REPORT.environment, packages={"torch": "2.14.0"})
    now = replace(REPORT, items=(worse, close, more), environment=newer, variables={}, seconds=99.0)
    assert changes(REPORT, now) == (
        "torch 2.13.0 -> 2.14.0",
        "NCCL_ALGO Ring -> none",
        "tried for the first time: c",
        "a: passed -> failed",
        "a: error_of_sum 2e-05 -> 5e-05",
    )
    assert changes(now, REPORT)[2] == "no longer tried: c"
    zero = replace(REPORT, items=(replace(REPORT.items[0], numbers={"error_of_sum": 0.0}),))
    assert "a: error_of_sum 0 -> 2e-05" in changes(zero, REPORT)


def level_markdown(report: LevelReport, changed: tuple[str, ...] | None) -> str:
    return markdown([level_section(report, changed)], level=1)


def test_the_summary_says_what_is_wrong_first_and_where_it_was_made() -> None:
    worse = replace(REPORT, items=(*REPORT.items, LevelItem(name="x", verdict="failed", good=False, says=("bits: …",))))
    assert REPORT.good and not replace(REPORT, items=()).good and not worse.good
    text = level_markdown(worse, ("torch 2.13.0 -> 2.14.0",))
    order = ["NOT GOOD", "1 problem", "x: failed; bits", "error_of_sum: 2e-05 of 0.01, a", "refusals", "2.14.0"]
    places = [text.index(words) for words in (*order, "Made by")]
    assert places == sorted(places)
    assert "driver: 580.1" in text and "NCCL_ALGO=Ring" in text and "rehearsal" not in text.lower()
    on_cpu = replace(REPORT, environment=replace(REPORT.environment, device="cpu"))
    assert "rehearsal" in level_line(on_cpu) and "nothing about a GPU" in level_markdown(on_cpu, None)
    assert "## Changed\n\n- nothing" in level_markdown(REPORT, ())


def test_a_fault_must_be_found_where_it_can_be_and_clean_runs_must_pass() -> None:
    matrix = MutationMatrix(
        clean=(make_trial(None, **PASSED, parity=3e-15), make_trial(None, message="off")),
        trials=(
            make_trial("found"),
            make_trial("missed", **PASSED),
            make_trial("equal", **PASSED, equivalent=True),
            make_trial("broken", verdict=Verdict.CRASH, not_reached="it raises when planted"),
        ),
        wall_s=1.0,
        interrupted=False,
    )
    verdicts = {item.name.partition(" in ")[0]: (item.verdict, item.good) for item in items_of(matrix)[2:]}
    assert verdicts == {
        "found": ("detected", True),
        "missed": ("not detected", False),
        "equal": ("not detected", True),
        "broken": ("not reached", False),
    }
    clean, off = items_of(matrix)[:2]
    assert clean.good and clean.numbers == {"parity": 3e-15}
    assert not off.good and off.says == ("off",)


def test_a_rehearsal_plants_one_fault_of_every_class() -> None:
    few = default_faults("cpu")
    assert len({fault.group for fault in few}) == len(few) == len({fault.group for fault in all_faults().values()})
    assert default_faults("cuda") == tuple(all_faults().values())


LONG = KernelCheck(scaling="tensorwise", m=16, k=4096, n=16, out="float32")
SAME = KernelObservation(shape=(16, 16), dtype="float32", expected_shape=(16, 16), expected_dtype="float32")
# torch 2.13's words: of its CUDA kernel, and of the meta registration that the contract asks.
WORDS = [
    ("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (32x40).", "alignment"),
    ("mat2 shape (48x24) must be divisible by 16", "alignment"),
    ("Expected self.size(1) to be divisible by 16, but got self.size(1)=40", "alignment"),
    ("Only multiplication of row-major and column-major matrices is supported by cuBLASLt", "layout"),
    ("mat2 must be col_major", "layout"),
    ("Multiplication of two Float8_e5m2 matrices is not supported", "operand dtypes"),
    ("Bias is not supported when out_dtype is set to Float32", "bias"),
    ("Bias must be BFloat16 to compute BFloat16 output, but got Half", "bias"),
    ("Only bf16 high precision output types are supported for row-wise scaling, got torch.float32", "output dtype"),
    ("Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.", "output dtype"),
    ("Invalid scaling configuration.\n- For TensorWise scaling, a and b should be float8", "scales"),
    ("Both scale_a and scale_b must be float (fp32) tensors.", "scales"),
    ("scale_a must be swizzled to SWIZZLE_32_4_4 format", "swizzle"),
    ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED", "unknown"),
]


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_a_refusal_is_about_one_thing(message: str, reason: str) -> None:
    assert reason_of(message) == reason


@given(st.integers(1, 10**5), st.booleans())
def test_a_bound_grows_with_the_sum_and_fast_accumulation_is_never_sharper(k: int, fast: bool) -> None:
    def allowed(k: int, *, fast: bool) -> float:
        return allowed_of_sum(KernelCheck(scaling="tensorwise", m=16, k=k, n=16, fast=fast), "tensor_core")

    check = KernelCheck(scaling="tensorwise", m=16, k=k, n=16, fast=fast)
    assert 0 < allowed_of_sum(check, "float32") < allowed(k, fast=fast) <= allowed(k + 1, fast=fast)
    assert allowed(k, fast=False) <= allowed(k, fast=True)


def test_the_bounds_are_those_that_are_derived() -> None:
    assert allowed_of_sum(LONG, "float32") == pytest.approx((4096 + 3) * 2**-23)
    blocks = 4 * 33 * 2**-13
    assert allowed_of_sum(LONG, "tensor_core") == pytest.approx(blocks + (4096 + 3) * 2**-23)


def kinds(check: KernelCheck, seen: KernelObservation) -> list[str]:
    return [problem.kind for problem in conclude(check, seen, "float32").problems]


def test_values_are_judged_by_bits_or_by_the_bound() -> None:
    integers = KernelCheck(scaling="tensorwise", m=16, k=64, n=16, out="float32", values="integers")
    assert kinds(integers, SAME) == kinds(LONG, replace(SAME, unequal=9, error_of_sum=1e-6)) == []
    assert kinds(integers, replace(SAME, unequal=1)) == ["bits"]
    assert kinds(LONG, replace(SAME, unequal=1, error_of_sum=1e-3)) == ["error"]
    assert kinds(LONG, replace(SAME, error_of_sum=float("nan"))) == ["error"], "NaN never passes"
    assert kinds(LONG, replace(SAME, nonfinite=2)) == ["nonfinite"]
    assert kinds(LONG, replace(SAME, dtype="bfloat16")) == ["shape"]


def test_both_refuse_for_one_reason_or_neither_does() -> None:
    alignment, layout, unknown = WORDS[0][0], WORDS[3][0], WORDS[-1][0]
    assert kinds(LONG, KernelObservation(raised=alignment, refusal=WORDS[2][0])) == []
    assert kinds(LONG, KernelObservation(raised=layout, refusal=alignment)) == ["message"]
    assert kinds(LONG, KernelObservation(raised=unknown, refusal=unknown)) == ["message"]
    assert kinds(LONG, KernelObservation(raised=alignment)) == ["refused"]
    assert kinds(LONG, KernelObservation(refusal=alignment)) == ["ran"]


def test_the_lists_have_every_way_of_calling() -> None:
    checks = value_checks((10, 0))
    assert {*checks} - {*value_checks((9, 0))} == {check for check in checks if check.scaling == "blocks"}
    assert len({check.id for check in checks}) == len(checks)
    assert {check.scaling for check in checks if check.fast} == {"tensorwise", "rowwise"}
    assert {check.values for check in checks} == {"integers", "normal", "positive", "nan", "inf", "zero_scale"}
    assert any(check.m == 0 for check in checks) and any(check.bias for check in checks)
    older, newer = refusal_checks((9, 0)), refusal_checks((10, 0))
    assert {check.misfit for check in older} - {check.misfit for check in newer} == {"a_column_major", "b_row_major"}
    assert {check.misfit for check in newer} - {check.misfit for check in older} == {"not_swizzled", "scale_of_shard"}
