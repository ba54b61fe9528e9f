"""What formulas say of wire and saved bytes is kept with what was measured, where they apply."""

from __future__ import annotations

from typing import Any

from harness.checks.measuring import measured
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.measured import Measured
from harness.performance.work import executed
from harness.trace.counts import FlopsRecord
from tests.builders import make_case, make_trace, make_witnesses, run_of, saved_as, traffic_of

FSDP = make_case(recipe="tensorwise", dp_shard=2, steps=3)


def measured_of(case: Case, **changes: Any) -> Measured:
    """The numbers of a run that sends and saves what the formulas say."""
    expect, steps = Expectations(case), range(1, case.train.steps + 1)
    traces = [
        make_trace(
            case,
            rank,
            **{
                "traffic": traffic_of(case, rank),
                "flops": tuple(
                    FlopsRecord(
                        step=step, part=words.split()[0], precision=words.split()[2], calls=each.calls, flops=each.flops
                    )
                    for step in steps
                    for words, each in executed(case, rank=rank, saves_attention=False).items()
                ),
                "saved_memory": tuple(saved_as(step, expect.saved_bytes(step=step, rank=rank)) for step in steps)
                if expect.saves_exactly
                else None,
                **changes,
            },
        )
        for rank in range(case.world_size)
    ]
    found = measured(case, run_of(*traces), make_witnesses(case))
    assert found is not None
    return found


def test_a_run_as_the_formulas_say() -> None:
    found = measured_of(FSDP)
    assert found.expected_wire == found.wire and len(found.wire) > 1
    assert found.expected_saved_bytes == found.saved_bytes and found.saved_bytes

    assert found.expected_flops == found.flops and found.flops.keys() >= {"matmuls in float8", "attention in float32"}


def test_what_was_not_recorded_has_no_expectation() -> None:
    assert measured_of(FSDP, flops=None).expected_flops == {}
    assert measured_of(FSDP, traffic=None).expected_wire == {}
    assert measured_of(FSDP, saved_memory=None).expected_saved_bytes is None


def test_attention_is_recomputed_where_the_kernel_of_a_cpu_computes_it() -> None:
    case = make_case(checkpointing="selective_op")
    on_cpu, on_gpu = (measured_of(case, device=device).expected_flops for device in ("cpu", "NVIDIA H100 80GB HBM3"))
    words = "attention in float32"
    assert on_cpu[words].calls / on_gpu[words].calls == 6 / 4  # 2 forwards, 2 of backward


def test_what_is_only_limited_is_left_out() -> None:
    found = measured_of(make_case(recipe="tensorwise", tp=2, compile="graph", tp_styles="float8"))
    assert found.expected_saved_bytes is None
    assert found.wire.keys() - found.expected_wire.keys() == {"all_reduce (max) in float64 along tp"}
