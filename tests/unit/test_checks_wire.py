"""The check `wire` finds every collective that is too much, missing, in another dtype or along another axis."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.wire import Key, check_wire, expected_traffic
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Float8, Layout, Train
from harness.trace import RankTrace, Run
from harness.trace.traffic import TrafficRecord
from harness.verdict import Finding

TRAIN = Train(steps=3, global_batch=4, seq_len=32)
TP = Case(layout=Layout(tp=2), float8=Float8(recipe="tensorwise"), train=TRAIN)
GATHERED = Case(layout=Layout(dp_shard=2), float8=Float8(recipe="tensorwise", fp8_all_gather=True), train=TRAIN)
HSDP = msgspec.structs.replace(GATHERED, layout=Layout(dp_replicate=2, dp_shard=2))
PRECOMPUTED = msgspec.structs.replace(
    GATHERED, float8=Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=True)
)
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
Records = tuple[TrafficRecord, ...]


def records(case: Case, rank: int = 0) -> Records:
    """What a correct run records."""
    return tuple(
        TrafficRecord(
            step=step,
            axis=key.axis,
            group_size=2,
            kind=key.kind,
            op=key.op,
            dtype=key.dtype,
            count=amount.times,
            payload_bytes=amount.payload_bytes,
            scalars=amount.scalars,
        )
        for step in range(1, case.train.steps + 1)
        for key, amount in expected_traffic(case, step=step, rank=rank).items()
    )


def trace(rank: int, traffic: Records | None) -> RankTrace:
    return RankTrace(
        rank=rank,
        steps=(),
        converted_fqns=(),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
        traffic=traffic,
    )


def check(case: Case, *traffic: Records | None) -> list[Finding]:
    traces = tuple(trace(rank, each) for rank, each in enumerate(traffic))
    return check_wire(case, Run(traces=traces, failures=()), WITNESSES)


def changed(case: Case, key: Key, **changes: object) -> Records:
    """A correct record with one kind of traffic changed in every step."""
    found = tuple(
        msgspec.structs.replace(record, **changes)
        if (record.axis, record.kind, record.op, record.dtype) == key
        else record
        for record in records(case)
    )
    assert found != records(case)
    return found


def without(case: Case, key: Key) -> Records:
    return tuple(r for r in records(case) if (r.axis, r.kind, r.op, r.dtype) != key)


@pytest.mark.parametrize("case", [TP, GATHERED, PRECOMPUTED], ids=["tp", "gathered", "precomputed"])
def test_what_the_formula_says_is_good(case: Case) -> None:
    assert check(case, records(case, 0), records(case, 1)) == []


@settings(max_examples=50)
@given(st.data(), st.sampled_from(["count", "payload_bytes", "scalars", "kind", "op", "dtype", "axis"]))
def test_every_change_of_every_record_is_found_at_its_step_and_rank(data: st.DataObject, field: str) -> None:
    case = data.draw(st.sampled_from([TP, GATHERED, PRECOMPUTED]))
    right = records(case)
    index, rank = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, 1))
    old = getattr(right[index], field)
    new = old + 1 if isinstance(old, int) else f"other {old}"
    wrong = (*right[:index], msgspec.structs.replace(right[index], **{field: new}), *right[index + 1 :])
    findings = check(case, *((wrong, right) if rank == 0 else (right, wrong)))
    assert findings
    assert {(finding.step, finding.rank) for finding in findings} == {(right[index].step, rank)}
    assert all(finding.expected and finding.found for finding in findings)


def test_a_record_too_much_or_missing_is_found() -> None:
    extra = msgspec.structs.replace(records(TP)[0], kind="broadcast", step=2)
    (found,) = check(TP, (*records(TP), extra), records(TP))
    assert (found.step, found.rank, found.expected) == (2, 0, "none")
    assert "nothing of this kind is expected" in found.message
    late = msgspec.structs.replace(records(TP)[0], step=4)
    assert check(TP, (*records(TP), late), records(TP))[0].step == 4


def test_weights_that_travel_in_high_precision_are_told_in_plain_words() -> None:
    """All 7 gathers in float32, as without float8 all-gather: 2.0 of the bytes of bfloat16."""
    high = expected_traffic(msgspec.structs.replace(GATHERED, float8=Float8(recipe="tensorwise")), step=1, rank=0)[
        Key("dp_shard", "all_gather", "", "float32")
    ]
    wrong = tuple(
        msgspec.structs.replace(record, count=high.times, payload_bytes=high.payload_bytes)
        if record.dtype == "float32" and record.kind == "all_gather"
        else record
        for record in without(GATHERED, Key("dp_shard", "all_gather", "", "uint8"))
    )
    first, *rest = check(GATHERED, wrong, wrong)
    assert first.message == (
        "float8 all-gather was asked for, but the converted weights travel in high precision on ranks 0-1"
    )
    assert (first.step, first.expected, first.found) == (1, "at most 0.51 of the bytes of bfloat16", "2.00")
    assert len(rest) == 2


def test_missing_amax_reductions_are_told_in_plain_words() -> None:
    wrong = without(TP, Key("tp", "all_reduce", "max", "float64"))
    first, second = check(TP, wrong, wrong)
    assert first.message.startswith("56 amax reductions are missing along tp")
    assert (first.expected, first.found) == ("57 reductions by max along tp", "1")
    assert "amax of weight of layers.0.attention.wq" in second.message


def test_amax_over_the_wrong_ranks_is_told_in_plain_words() -> None:
    key = Key("dp_shard", "all_reduce", "max", "float32")
    wrong = changed(HSDP, key, axis="world")
    first, *_ = check(HSDP, *[wrong] * 4)
    assert first.message == "amax is reduced over the wrong ranks: not along dp_shard on ranks 0-3"
    assert first.found == "0 along dp_shard, 28 along world too many"


def test_a_stale_scale_shows_as_amax_of_step_one_repeated() -> None:
    """Without the precomputed scales every gather reduces its own amax in every step."""
    wrong = tuple(
        msgspec.structs.replace(record, step=step)
        for step in (1, 2, 3)
        for record in records(PRECOMPUTED)
        if record.step == 1
    )
    assert {finding.step for finding in check(PRECOMPUTED, wrong, records(PRECOMPUTED))} == {2}


def test_what_was_not_recorded_is_a_finding() -> None:
    (found,) = check(TP, records(TP), None)
    assert found.message == "no traffic was recorded on rank 1"
    assert check(TP)
    assert check(TP, (), ())
    assert check(Case(train=TRAIN), ()) == []  # one rank sends nothing, and said so
