"""Underflow: the share of values that casts lose is that of one rank, exactly or within rounding."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.underflow import (
    EXACT,
    FLUSHED,
    MEASURED_STEPS,
    NO_REFERENCE,
    NOTHING_COMPARED,
    ROUNDED,
    SATURATED,
    cast_shares,
    check_underflow,
    with_cast_shares,
)
from harness.matrix.case import Case
from harness.trace import Run
from harness.trace.operands import CastRecord, OperandTrace
from harness.verdict import Finding
from tests.builders import make_case, make_cast, make_trace, make_witnesses, not_judged, run_of

SHARP = make_case(tp=2, recipe="tensorwise", dtype="float64", steps=2)
ROUND = make_case(tp=2, recipe="tensorwise", dtype="bfloat16", steps=2)


def casts(*, flushed: int = 8, saturated: int = 0, elements: int = 1000, **changes: Any) -> tuple[CastRecord, ...]:
    """The cast of an input in two steps."""
    return tuple(
        make_cast(index=step, step=step, flushed=flushed, saturated=saturated, elements=elements, **changes)
        for step in (1, 2)
    )


def of_ranks(*ranks: tuple[CastRecord, ...]) -> Run:
    operands = (OperandTrace(casts=recorded, matmuls=()) for recorded in ranks)
    return run_of(*(make_trace(SHARP, rank, operands=operand_trace) for rank, operand_trace in enumerate(operands)))


SOLO = with_cast_shares(of_ranks(casts()))


def check(run: Run, case: Case = SHARP, solo: Run | None = SOLO) -> list[Finding]:
    return check_underflow(case, run, make_witnesses(case, solo=solo))


def test_shards_lose_together_what_one_rank_loses() -> None:
    assert check(of_ranks(casts(flushed=3, elements=500), casts(flushed=5, elements=500))) == []
    assert check(of_ranks(casts(), casts())) == [], "replicas lose the same share each"
    recomputed = (*casts(), *casts(phase="recompute"))
    assert check(of_ranks(recomputed)) == [], "what is cast again loses the same share"


@pytest.mark.parametrize(
    ("case", "step", "is_found"),
    [(ROUND, MEASURED_STEPS, True), (ROUND, MEASURED_STEPS + 1, False), (SHARP, MEASURED_STEPS + 1, True)],
)
def test_a_limit_of_rounding_holds_for_the_steps_that_it_was_measured_over(
    case: Case, step: int, is_found: bool
) -> None:
    long = replace(case, train=replace(case.train, steps=MEASURED_STEPS + 1))
    steps = range(1, MEASURED_STEPS + 2)
    alike = tuple(make_cast(index=number, step=number, flushed=8, elements=1000) for number in steps)
    lost = tuple(replace(cast, flushed=100) if cast.step == step else cast for cast in alike)
    assert bool(check(of_ranks(lost), long, with_cast_shares(of_ranks(alike)))) is is_found


def test_the_shares_of_a_solo_witness_take_the_place_of_its_operands() -> None:
    (trace,) = SOLO.traces
    assert trace.operands is None and trace.cast_shares is not None
    assert [(share.step, share.elements, share.flushed) for share in trace.cast_shares] == [(1, 1000, 8), (2, 1000, 8)]
    assert cast_shares(run_of(make_trace(SHARP)).traces) == ()


@pytest.mark.parametrize(("name", "rule"), [("flushed", FLUSHED), ("saturated", SATURATED)])
def test_another_share_is_a_finding_that_names_operand_step_and_both_shares(name: str, rule: Any) -> None:
    first, second = casts()
    (finding,) = check(of_ranks((first, replace(second, **{name: getattr(second, name) + 2}))))
    assert (finding.rule, finding.step, finding.module, finding.operand) == (rule.name, 2, first.fqn, "input")
    assert finding.values["distance"] == pytest.approx(0.002) and finding.values["allowed"] == EXACT
    assert (finding.values["count"], finding.values["compared"]) == (1, 2)


def test_rounding_moves_values_over_the_edge_of_a_flush_only_where_there_is_any() -> None:
    slightly, more = (of_ranks(casts(flushed=8 + int(ROUNDED * 1000) + extra)) for extra in (0, 2))
    assert [finding.rule for finding in check(slightly)] == [FLUSHED.name]
    assert check(slightly, ROUND) == []
    assert [finding.rule for finding in check(more, ROUND)] == [FLUSHED.name]
    hsdp = make_case(dp_replicate=2, dp_shard=2, recipe="tensorwise", dtype="bfloat16")
    assert [finding.rule for finding in check(slightly, hsdp)] == [FLUSHED.name]


def test_it_says_what_it_lacks_and_bf16_casts_nothing() -> None:
    run = of_ranks(casts(), casts())
    other = with_cast_shares(of_ranks(casts(fqn="elsewhere")))
    for findings, rule in (
        (check(run, solo=None), NO_REFERENCE),
        (check(run, solo=other), NOTHING_COMPARED),
    ):
        assert [(finding.rule, finding.judged) for finding in findings] == [(rule.name, False)]
    assert "underflow" in not_judged(make_case(recipe="bf16")) and "underflow" not in not_judged(SHARP)
