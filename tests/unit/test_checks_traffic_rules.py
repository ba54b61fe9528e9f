"""The rules of traffic that hold for any model: each is broken by one planted change and by nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.checks.check import Witnesses
from harness.checks.traffic import (
    AMAX_MISSING,
    HIGH_PRECISION,
    NOT_PRECOMPUTED,
    NOT_SUMMED,
    REDUCE_DTYPE,
    UNKNOWN_RANKS,
    check_traffic,
)
from harness.expect.expectations import Expectations
from harness.expect.model import found_model
from harness.matrix.caseid import parse_case_id
from harness.trace import RankTrace, Run
from harness.trace.counts import TrafficRecord
from harness.trace.model import Linear, ModelRecord, Parameter
from harness.trace.operands import OperandTrace
from harness.verdict import Finding
from tests.builders import make_cast, make_trace, run_of

CASE = parse_case_id("target.mine-hsdp2x2-tp2-tensorwise-ag.fp8-v2048-s1-f32")
SHARD = 64  # elements of the one weight on every rank


def traffic(
    axis: str, kind: str, elements: int, *, op: str = "", dtype: str = "float32", times: int = 1
) -> TrafficRecord:
    return TrafficRecord(
        step=1,
        axis=axis,
        kind=kind,
        op=op,
        dtype=dtype,
        payload_bytes=elements * times * (1 if dtype == "uint8" else 4),
        sizes={elements: times},
    )


MODEL = ModelRecord(
    linears=(Linear(fqn="up", in_features=16, out_features=32, converted=True),),
    parameters=(
        Parameter(
            fqn="up.weight",
            shape=(32, 16),
            dtype="float32",
            local_elements=SHARD,
            axes=("dp_replicate", "dp_shard", "tp"),
            trained=True,
        ),
    ),
    checkpointed=(),
    compiled=(),
    calls={"up": 2},
    recomputed={},
)
GOOD = (
    traffic("dp_shard", "reduce_scatter", 2 * SHARD, op="sum"),
    traffic("dp_replicate", "all_reduce", SHARD, op="sum"),
    traffic("dp_shard", "all_gather", SHARD, dtype="uint8", times=2),
    traffic("tp", "all_reduce", 1, op="max", dtype="float64"),
    traffic("world", "all_reduce", 1, op="sum"),
)


def run(*records: TrafficRecord, compiled: bool = False) -> Run:
    cast = make_cast(fqn="up", role="input", phase="forward", placements=("Shard(1)",), mesh_axes=("tp",))
    gathered = make_cast(fqn="up", role="weight", phase="all_gather")

    def trace(rank: int) -> RankTrace:
        operands = None if compiled else OperandTrace(casts=(cast, gathered, gathered), matmuls=())
        return make_trace(rank=rank, traffic=records or GOOD, operands=operands, model=MODEL)

    return run_of(*(trace(rank) for rank in range(8)))


def check(*records: TrafficRecord, compiled: bool = False) -> list[Finding]:
    expect = Expectations(CASE, found_model(CASE, replace(MODEL, calls={"up": 8}), MODEL))
    return check_traffic(CASE, run(*records, compiled=compiled), Witnesses(expect=expect))


def changed(index: int, record: TrafficRecord) -> tuple[TrafficRecord, ...]:
    return (*GOOD[:index], record, *GOOD[index + 1 :])


def test_what_must_be_sent_is_enough() -> None:
    assert check() == []
    assert check(*GOOD, traffic("dp_shard+tp", "broadcast", 3)) == []


def test_gradients_that_are_not_reduced_are_found() -> None:
    (finding,) = check(*changed(0, traffic("dp_shard", "reduce_scatter", 2 * SHARD - 1, op="sum")))
    assert (finding.rule, finding.values["axis"]) == (NOT_SUMMED.name, "dp_shard")
    (finding,) = check(*GOOD[:1], *GOOD[2:])
    assert (finding.rule, finding.values["axis"]) == (NOT_SUMMED.name, "dp_replicate")


def test_gradients_reduced_in_another_dtype_are_found() -> None:
    record = traffic("dp_shard", "reduce_scatter", 2 * SHARD, dtype="bfloat16", op="sum")
    (finding,) = check(*changed(0, record))
    assert finding.rule == REDUCE_DTYPE.name
    assert dict(finding.values) == {"dtypes": "bfloat16", "asked": "float32"}


def test_weights_gathered_in_high_precision_are_found() -> None:
    (finding,) = check(*changed(2, traffic("dp_shard", "all_gather", SHARD, times=2)))
    assert finding.rule == HIGH_PRECISION.name
    often = changed(2, traffic("dp_shard", "all_gather", SHARD, dtype="uint8", times=8))
    assert check(*often, compiled=True) == [], "a compiled run does not say how often weights are gathered"


def test_a_missing_amax_reduction_is_found() -> None:
    (finding,) = check(*GOOD[:3], *GOOD[4:])
    assert (finding.rule, dict(finding.values)) == (AMAX_MISSING.name, {"axis": "tp", "missing": 1})
    (finding,) = check(*changed(3, traffic("tp", "all_reduce", 256, op="max", dtype="float64")))
    assert finding.rule == AMAX_MISSING.name, "the largest logits of tokens are no amax"
    assert finding.values["axis"] == "tp"


def test_ranks_that_no_axis_joins_are_found() -> None:
    (finding,) = check(*GOOD, traffic("ranks 0,3", "all_reduce", 1, op="sum"))
    assert (finding.rule, finding.found) == (UNKNOWN_RANKS.name, "ranks 0,3")


PRECOMPUTED = parse_case_id("target.mine-hsdp2x2-tp2-tensorwise-ag.fp8pre-v2048-s2-f32")
WEIGHTS = 4  # casts of weights before a gather, in each step


def maxima(*in_steps: int) -> list[Finding]:
    """What is found of a run in which a rank reduces so many amaxes one by one in its steps."""
    gathered = make_cast(fqn="up", role="weight", phase="all_gather")
    sent = (
        replace(record, step=step)
        for step, count in enumerate(in_steps, 1)
        for record in (*GOOD, traffic("dp_shard", "all_reduce", 1, op="max", times=count))
    )
    casts = tuple(replace(gathered, step=step) for step in (1, 2) for _ in range(WEIGHTS))
    trace = make_trace(traffic=tuple(sent), operands=OperandTrace(casts=casts, matmuls=()), model=MODEL)
    traces = (replace(trace, rank=rank) for rank in range(8))
    expect = Expectations(PRECOMPUTED, found_model(PRECOMPUTED, MODEL, MODEL))
    return check_traffic(PRECOMPUTED, run_of(*traces), Witnesses(expect=expect))


@pytest.mark.parametrize("own", [0, 2])
def test_a_weight_that_reduces_an_amax_although_its_scale_is_precomputed_is_found(own: int) -> None:
    assert maxima(WEIGHTS + own, own) == [], "the target may reduce numbers by max too"
    assert maxima(own, own) == [], "scales may be precomputed before the first step"
    (finding,) = maxima(WEIGHTS + own, own + 1)
    assert (finding.rule, finding.ranks) == (NOT_PRECOMPUTED.name, tuple(range(8)))
