"""The check `fp8_on` finds every linear, filter entry and scaled matmul that is missing or too much."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.fp8_on import check_fp8_on
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Float8, Layout, Recipe
from harness.trace import RankTrace, Run, StepTrace
from harness.verdict import Finding, Verdict

FQNS = ("layers.0.w1", "layers.0.w2", "layers.1.w1")
CALLS = 9


def case(recipe: Recipe = "tensorwise", tp: int = 2) -> Case:
    return Case(layout=Layout(tp=tp), float8=Float8(recipe=recipe))


def trace(
    rank: int,
    *,
    fqns: tuple[str, ...] = FQNS,
    calls: tuple[int, ...] = (CALLS, CALLS),
    device: str = "cpu",
    virtual: tuple[str, ...] = ("collectives", "scaled_mm"),
    unmatched: tuple[str, ...] = (),
) -> RankTrace:
    steps = tuple(
        StepTrace(step=number, loss=7.0, grad_norm=1.0, scaled_mm_calls=count, seconds=0.1)
        for number, count in enumerate(calls, 1)
    )
    return RankTrace(
        rank=rank,
        steps=steps,
        converted_fqns=fqns,
        unmatched_filters=unmatched,
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device=device,
        virtual=virtual,
    )


def check(
    *traces: RankTrace, of: Case | None = None, fqns: tuple[str, ...] = FQNS, calls: int = CALLS
) -> list[Finding]:
    witnesses = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=fqns, expected_scaled_mm=calls)
    return check_fp8_on(of or case(), Run(traces=traces, failures=()), witnesses)


def test_as_expected() -> None:
    assert check(trace(0), trace(1)) == []


@given(st.sets(st.sampled_from([*FQNS, "output", "layers.0.wq"])), st.integers(0, 1))
def test_any_other_set_of_linears_on_any_rank_fails_and_names_them(found: set[str], rank: int) -> None:
    odd = trace(rank, fqns=tuple(sorted(found)))
    findings = check(odd, trace(1 - rank))
    assert {finding.module for finding in findings} == found ^ set(FQNS)
    assert {finding.rank for finding in findings} <= {rank}


def test_the_direction_is_told() -> None:
    (lacking,) = check(trace(0, fqns=FQNS[1:]), trace(1, fqns=FQNS[1:]))
    assert lacking.message == "layers.0.w1 was not converted to FP8 on ranks 0-1"
    (extra,) = check(trace(0), trace(1, fqns=(*FQNS, "output")))
    assert extra.message == "output was converted to FP8 on rank 1"
    assert extra.verdict is Verdict.INVARIANT


def test_a_linear_recorded_twice_is_found() -> None:
    (found,) = check(trace(0, fqns=(*FQNS, FQNS[0])), trace(1))
    assert "recorded twice" in found.message


@given(st.integers(0, 1), st.integers(0, 1), st.integers(0, 50).filter(lambda count: count != CALLS))
def test_any_other_number_of_calls_at_any_step_and_rank_fails(rank: int, index: int, count: int) -> None:
    calls = tuple(count if at == index else CALLS for at in range(2))
    (found,) = check(trace(rank, calls=calls), trace(1 - rank))
    assert (found.step, found.rank) == (index + 1, rank)
    assert found.expected == f"{CALLS} calls a step" and found.found == f"{count} calls"


def test_calls_that_cancel_out_over_steps_or_ranks_are_found() -> None:
    assert check(trace(0, calls=(CALLS - 1, CALLS + 1)), trace(1))
    assert check(trace(0, calls=(CALLS - 1, CALLS)), trace(1, calls=(CALLS + 1, CALLS)))


def test_a_filter_entry_that_matches_nothing_is_named() -> None:
    (found,) = check(trace(0), trace(1, unmatched=("wqq",)))
    assert "wqq" in found.message and found.rank == 1


def test_the_order_of_ranks_does_not_matter() -> None:
    ranks = [trace(0, fqns=()), trace(1, calls=(1, 2)), trace(2, virtual=()), trace(3, unmatched=("x",))]
    assert check(*ranks) == check(*reversed(ranks))
    assert len(check(*ranks)) == len(FQNS) + 3


def test_nothing_to_compare_is_a_finding() -> None:
    assert check()
    assert check(trace(0, calls=()), trace(1))
    assert check(trace(0, fqns=()), trace(1, fqns=()), fqns=())
    assert check(trace(0, calls=(0, 0)), trace(1, calls=(0, 0)), calls=0)


def test_bf16_converts_nothing_whatever_the_witnesses_say() -> None:
    bf16 = case("bf16")
    assert check(trace(0, fqns=(), calls=(0, 0)), trace(1, fqns=(), calls=(0, 0)), of=bf16) == []
    assert check(trace(0, fqns=(), calls=(0, 0)), trace(1, fqns=(), calls=(0, 1)), of=bf16)
    assert len(check(trace(0), trace(1), of=bf16)) == len(FQNS) + 1


@pytest.mark.parametrize(
    ("recipe", "tp", "virtual", "good"),
    [
        ("tensorwise", 2, ("collectives", "scaled_mm"), True),
        ("tensorwise", 2, ("async_tp", "collectives", "scaled_mm"), True),
        ("tensorwise", 2, ("collectives",), False),
        ("tensorwise", 2, ("scaled_mm",), False),
        ("tensorwise", 1, ("scaled_mm",), True),
        ("tensorwise", 1, (), False),
        ("bf16", 2, ("collectives",), True),
        ("bf16", 2, (), False),
        ("bf16", 1, (), True),
    ],
)
def test_the_cpu_needs_its_stand_ins(recipe: Recipe, tp: int, virtual: tuple[str, ...], good: bool) -> None:
    fp8 = recipe != "bf16"
    only = trace(0, fqns=FQNS if fp8 else (), calls=(CALLS, CALLS) if fp8 else (0, 0), virtual=virtual)
    assert (check(only, of=case(recipe, tp)) == []) is good


def test_a_gpu_has_no_stand_ins() -> None:
    real = trace(0, device="NVIDIA H200", virtual=())
    assert check(real) == []
    (found,) = check(msgspec.structs.replace(real, virtual=("scaled_mm",)))
    assert "replace the real one" in found.message


def test_findings_come_in_one_order_whatever_the_order_of_the_records() -> None:
    names = tuple(f"layers.{number}.{name}" for number in range(8) for name in ("w1", "w2"))
    lacking = check(trace(0, fqns=()), trace(1, fqns=()), fqns=tuple(reversed(names)))
    assert [finding.module for finding in lacking] == sorted(names)
    extra = check(trace(0, fqns=tuple(reversed(names))), trace(1, fqns=names), fqns=("other",))
    assert [finding.module for finding in extra] == ["other", *sorted(names)]
    twice = check(trace(0, fqns=names + names), fqns=names)
    assert [finding.module for finding in twice] == sorted(names)


def test_the_words_about_the_virtual_device() -> None:
    (found,) = check(trace(0, virtual=()), trace(1, virtual=()))
    assert found.message == "the virtual FP8 device lacks collectives, scaled_mm on ranks 0-1"
    assert (found.expected, found.found) == ("collectives, scaled_mm", "nothing")
    (found,) = check(trace(0, virtual=("x", "a")), trace(1, virtual=("a", "x")))
    assert found.found == "a, x"


def test_ranks_without_steps_are_named() -> None:
    (found,) = check(trace(0, calls=()), trace(1, calls=()))
    assert found.message == "no step was counted on ranks 0-1" and found.rank == 0
