"""Resumed runs on real ranks: no bit changes, in any layout that the state goes through, and nothing is left alive."""

from __future__ import annotations

import pytest

from harness.matrix.resumed import resumed_in
from tests.builders import make_case
from tests.worker.runs import numbers, sweep

GATHERED = {"recipe": "tensorwise", "fp8_all_gather": True, "precompute_scale": True}
OFF = {"resume": "none"}


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2, **GATHERED, "resume": "same"},
        {"tp": 2, "recipe": "rowwise", "resume": "resharded"},
        sweep({"resume": "same"}),
        sweep({"dp_shard": 2, "tp": 2, **GATHERED, "resume": "resharded"}),
        sweep({"dp_replicate": 2, "dp_shard": 2, **GATHERED, "resume": "resharded"}),
        sweep({"dp_shard": 4, **GATHERED, "resume": "resharded"}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(trained, axes):
    case, plain = (
        make_case(**{"steps": 3, "global_batch": 4, "dtype": "bfloat16", **axes, **last}) for last in ({}, OFF)
    )
    resumed, through = (trained(each, probes=("sketches", "saved_memory")).traces for each in (case, plain))
    assert numbers(resumed) == numbers(through)
    for one, other in zip(resumed, through, strict=True):
        assert one.sketches == other.sketches
        assert one.inputs == other.inputs
        assert one.saved_memory == other.saved_memory
        assert one.resumed is not None
        assert other.resumed is None
        assert one.resumed.after_step == 1
        assert one.resumed.loaded == (one.resumed.saved,) * len(resumed_in(case))


def test_the_state_is_that_of_model_and_optimizer(trained):
    (trace,) = trained(make_case(steps=2, global_batch=4, resume="same", dtype="float64"), probes=()).traces
    state = trace.resumed.saved
    assert {"norm.weight", "norm.weight exp_avg", "norm.weight exp_avg_sq", "norm.weight step"} <= state.keys()
    assert state["norm.weight lr"] == "0.001"
    assert state["output.weight exp_avg"].startswith("float64 [2048, 128] ")
