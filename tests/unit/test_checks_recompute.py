"""The check `recompute` finds everything that is not the same the second time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.checks.expectedcasts import is_recomputed
from harness.checks.recompute import check_recompute
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, Float8, Layout, Train
from harness.spec.gemms import converted_fqns, gemms, recomputed_calls
from harness.trace import RankTrace, Run, StepTrace
from harness.trace.operands import CastRecord, MatmulRecord, OperandTrace, ScaleSummary
from harness.verdict import Finding

SCALE = ScaleSummary(
    shape=(),
    dtype="float32",
    minimum=2.0,
    maximum=2.0,
    total=2.0,
    log2_total=1.0,
    digest="s",
    power_of_two=True,
)
OTHER = msgspec.structs.replace(SCALE, minimum=1.0, maximum=1.0, digest="t")
TRAIN = Train(steps=1, global_batch=4, seq_len=32)
TENSORWISE = Float8(recipe="tensorwise")


def cast(index: int, fqn: str, role: Any, phase: Any) -> CastRecord:
    return CastRecord(
        index=index,
        step=1,
        fqn=fqn,
        role=role,
        phase=phase,
        shape=(4, 4),
        local_shape=(4, 4),
        placements=(),
        mesh_axes=(),
        source_dtype="float32",
        target_dtype="float8_e4m3fn",
        axiswise_dim=None,
        scale=SCALE,
        amax=224.0,
        scaled_amax_minimum=448.0,
        scaled_amax_maximum=448.0,
        saturated=0,
        flushed=0,
        nonfinite=0,
        mismatched=0,
        elements=16,
        data_digest=f"{fqn} {role}",
    )


def matmul(index: int, fqn: str, gemm: Any) -> MatmulRecord:
    return MatmulRecord(
        index=index,
        step=1,
        fqn=fqn,
        gemm=gemm,
        m=4,
        k=4,
        n=4,
        a_dtype="float8_e4m3fn",
        b_dtype="float8_e4m3fn",
        a_scale=SCALE,
        b_scale=SCALE,
        a_digest="a",
        b_digest="b",
    )


def recorded(of: Case) -> OperandTrace:
    """Forward, recomputation and backward of every linear, without gradients."""
    gathers = of.float8.fp8_all_gather
    again = [fqn for fqn in converted_fqns(of) if is_recomputed(of, fqn)]
    weight = "gathered" if gathers else None
    sites = [
        (fqn, role, phase)
        for fqn in converted_fqns(of)
        for role, phase in (("input", "forward"), ("weight", weight or "forward"))
    ]
    sites += [
        (fqn, role, phase)
        for fqn in again
        for role, phase in (("input", "recompute"), ("weight", weight or "recompute"))
    ]
    sites += [
        (fqn, role, phase)
        for fqn in converted_fqns(of)
        for role, phase in (("input", "backward"), ("weight", weight or "backward"))
    ]
    casts = tuple(cast(index, *site) for index, site in enumerate(sites))
    forwards = [
        matmul(100 + index, gemm.fqn, "forward") for index, gemm in enumerate(gemms(of)) if gemm.role == "forward"
    ]
    recomputed = [matmul(200 + index, fqn, "recompute") for index, fqn in enumerate(again[: recomputed_calls(of)])]
    return OperandTrace(casts=casts, matmuls=(*forwards, *recomputed))


def check(of: Case, operands: OperandTrace | None) -> list[Finding]:
    trace = RankTrace(
        rank=0,
        steps=(StepTrace(step=1, loss=7.0, grad_norm=1.0, scaled_mm_calls=1, seconds=0.1),),
        converted_fqns=(),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
        operands=operands,
    )
    witnesses = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
    return check_recompute(of, Run(traces=(trace,), failures=()), witnesses)


FULL = Case(float8=TENSORWISE, checkpointing=Checkpointing(mode="full"), train=TRAIN)
GATHERED = Case(
    layout=Layout(dp_shard=2),
    float8=Float8(recipe="tensorwise", fp8_all_gather=True),
    checkpointing=Checkpointing(mode="full"),
    train=TRAIN,
)


@pytest.mark.parametrize(
    "of",
    [
        Case(float8=TENSORWISE, train=TRAIN),
        FULL,
        GATHERED,
        Case(float8=TENSORWISE, checkpointing=Checkpointing(mode="selective_op"), train=TRAIN),
        Case(float8=TENSORWISE, checkpointing=Checkpointing(mode="selective_layer"), train=TRAIN),
    ],
)
def test_the_same_the_second_time_has_no_findings(of: Case) -> None:
    assert check(of, recorded(of)) == []


@pytest.mark.parametrize("phase", ["recompute", "backward"])
@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize(
    "change", [{"scale": OTHER}, {"data_digest": "x"}, {"elements": 8}, {"target_dtype": "float8_e5m2"}]
)
def test_a_cast_that_differs_is_found(phase: str, role: str, change: dict[str, Any]) -> None:
    wrong = tuple(
        msgspec.structs.replace(one, **change) if (one.phase, one.role) == (phase, role) and "wk" in one.fqn else one
        for one in recorded(FULL).casts
    )
    (found,) = check(FULL, OperandTrace(casts=wrong, matmuls=recorded(FULL).matmuls))
    assert (found.step, found.rank, found.module) == (1, 0, "layers.0.attention.wk")
    assert found.expected != found.found and "2 difference(s)" in found.message


def test_a_gathered_weight_that_changes_between_forward_and_backward_is_found() -> None:
    mine = recorded(GATHERED)
    last = mine.casts[-1]
    assert last.phase == "gathered"
    wrong = (*mine.casts[:-1], msgspec.structs.replace(last, data_digest="x"))
    (found,) = check(GATHERED, OperandTrace(casts=wrong, matmuls=mine.matmuls))
    assert found.module == last.fqn


@pytest.mark.parametrize("change", [{"a_scale": OTHER}, {"b_digest": "x"}, {"m": 8}, {"b_dtype": "float8_e5m2"}])
def test_a_recomputed_matmul_that_differs_is_found(change: dict[str, Any]) -> None:
    mine = recorded(FULL)
    wrong = (*mine.matmuls[:-1], msgspec.structs.replace(mine.matmuls[-1], **change))
    (found,) = check(FULL, OperandTrace(casts=mine.casts, matmuls=wrong))
    assert "recomputed matmul" in found.message


def test_checkpointing_that_recomputes_nothing_is_found() -> None:
    mine = recorded(FULL)
    casts = tuple(one for one in mine.casts if one.phase != "recompute")
    (found,) = check(FULL, OperandTrace(casts=casts, matmuls=mine.matmuls))
    assert found.expected == "a recomputation"
    (found,) = check(FULL, OperandTrace(casts=mine.casts, matmuls=mine.matmuls[:-1]))
    assert "number of recomputed matmuls" in found.message
