"""The check `graph_scales` finds every cast inside of a graph whose scale is not the one it must have."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from harness.checks.graphcasts import check_graph_casts
from harness.checks.scales import right_scale
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.caseid import parse_case_id
from harness.trace import RankTrace, Run
from harness.trace.graphs import GraphCast, GraphTrace
from harness.trace.operands import ScaleSummary
from harness.verdict import Finding

TENSORWISE = parse_case_id("tp2-tensorwise-graph-v2048-s2-b16")
ROWWISE = parse_case_id("tp2-rowwise-graph-v2048-s2-b16")
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
AMAX = (0.5, 2.0)  # of the two ranks


def scale(value: float, shape: tuple[int, ...] = ()) -> ScaleSummary:
    return ScaleSummary(
        shape=shape,
        dtype="float32",
        minimum=value,
        maximum=value,
        total=value,
        log2_total=0.0,
        digest=repr(value),
        power_of_two=math.frexp(value)[0] == 0.5,
    )


def cast(rank: int, step: int, summary: ScaleSummary, **changes: Any) -> GraphCast:
    amax = AMAX[rank]
    reached = amax * summary.maximum
    found = GraphCast(
        step=step,
        order=1,
        phase="forward",
        fqn="feed_forward.w1",
        is_weight=True,
        shape=(64, 128),
        target_dtype="float8_e4m3fn",
        scale=summary,
        amax=amax,
        scaled_amax_minimum=reached,
        scaled_amax_maximum=reached,
        saturated=0,
        nonfinite=0,
        mismatched=0,
        elements=64 * 128,
    )
    return msgspec.structs.replace(found, **changes)


def shared(rank: int, step: int) -> GraphCast:
    """Both ranks use the scale of the larger magnitude, as they must."""
    return cast(rank, step, scale(right_scale("float8_e4m3fn", max(AMAX))))


def own_rows(rank: int, step: int) -> GraphCast:
    """Every rank scales its own rows by powers of two."""
    return cast(rank, step, scale(2.0 ** math.floor(math.log2(448 / AMAX[rank])), (64, 1)))


def check(case: Case, casts: list[list[GraphCast]] | None) -> list[Finding]:
    traces = tuple(
        RankTrace(
            rank=rank,
            steps=(),
            converted_fqns=(),
            unmatched_filters=(),
            peak_memory_bytes=0,
            data_digest="d",
            software={},
            device="cpu",
            virtual=(),
            graphs=GraphTrace(graphs=(), calls=(), casts=None if casts is None else tuple(casts[rank]), workarounds=()),
        )
        for rank in range(2)
    )
    return check_graph_casts(case, Run(traces=traces, failures=()), WITNESSES)


def with_one(make: Any, **changes: Any) -> list[list[GraphCast]]:
    """A correct run, but for the cast of rank 1 in step 2."""
    casts = [[make(rank, step) for step in (1, 2)] for rank in range(2)]
    casts[1][1] = msgspec.structs.replace(casts[1][1], **changes)
    return casts


def test_correct_casts_have_no_finding() -> None:
    assert check(TENSORWISE, with_one(shared)) == []
    assert check(ROWWISE, with_one(own_rows)) == []


def test_a_step_without_casts_is_found() -> None:
    casts = with_one(shared)
    casts[1].pop()
    (finding,) = check(TENSORWISE, casts)
    assert "no cast to float8 was executed in some step on rank 1" in finding.message


def test_generated_code_and_bf16_have_nothing_to_say() -> None:
    assert check(parse_case_id("tp2-tensorwise-inductor-v2048-s2-b16"), None) == []
    assert check(parse_case_id("tp2-bf16-graph-v2048-s2-b16"), [[], []]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"saturated": 3}, "values saturate"),
        ({"nonfinite": 1}, "NaN or infinite"),
        ({"mismatched": 1}, "not the cast of their source"),
        ({"target_dtype": "float8_e4m3fnuz"}, "cast to the wrong dtype"),
    ],
)
def test_what_a_cast_did_wrong_is_found(changes: dict[str, Any], words: str) -> None:
    findings = check(TENSORWISE, with_one(shared, **changes))
    (finding,) = [each for each in findings if words in each.message]
    assert (finding.step, finding.rank, finding.module) == (2, 1, "feed_forward.w1")


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (msgspec.structs.replace(scale(224.0), dtype="bfloat16"), "wrong dtype"),
        (msgspec.structs.replace(scale(224.0), minimum=math.nan, maximum=math.nan), "not finite and positive"),
        (scale(224.0, (128, 1)), "wrong shape"),
        (scale(224.0, (3, 64, 1)), "wrong shape"),
    ],
)
def test_a_malformed_scale_is_found(summary: ScaleSummary, words: str) -> None:
    assert any(words in finding.message for finding in check(TENSORWISE, with_one(shared, scale=summary)))


def test_a_local_scale_is_found() -> None:
    own = scale(right_scale("float8_e4m3fn", AMAX[0]))
    casts = [[cast(rank, step, own if rank == 0 else shared(1, step).scale) for step in (1, 2)] for rank in range(2)]
    words = [finding.message for finding in check(TENSORWISE, casts)]
    assert any("TP ranks that hold one tensor have different scales" in each for each in words)
    assert any("does not fit the largest magnitude" in each for each in words)


def test_a_stale_scale_is_found_to_the_last_bit() -> None:
    stale = scale(right_scale("float8_e4m3fn", math.nextafter(2.0, 3.0) * (1 + 1e-6)))
    casts = [[cast(rank, step, stale) for step in (1, 2)] for rank in range(2)]
    (finding,) = check(TENSORWISE, casts)
    assert "does not fit the largest magnitude" in finding.message


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_rows_scaled_by_another_power_are_found(factor: float) -> None:
    right = own_rows(1, 2).scale.maximum * factor
    found = cast(1, 2, scale(right, (64, 1)))
    casts = with_one(own_rows)
    casts[1][1] = found
    assert any("does not fit" in finding.message for finding in check(ROWWISE, casts))


def test_a_scale_that_is_no_power_of_two_is_found() -> None:
    casts = with_one(own_rows, scale=scale(200.0, (64, 1)))
    assert any("not a power of two" in finding.message for finding in check(ROWWISE, casts))


def test_ranks_that_execute_different_casts_are_found() -> None:
    assert any("different casts" in finding.message for finding in check(TENSORWISE, with_one(shared, order=2)))
