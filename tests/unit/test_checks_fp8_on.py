"""The checks `fp8_on` and `matmuls`: which linears are in FP8, whether it is used, and how often FP8 multiplies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import fp8_on
from harness.checks.check import Rule
from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns
from harness.matrix.recipes import Recipe
from harness.trace import RankTrace
from harness.verdict import Finding, Verdict
from tests.builders import make_case, make_run, make_trace, make_witnesses, run_of

CASE = make_case(recipe="tensorwise", tp=2, steps=2, filter_fqns=("attention", "w3"))
FQNS = converted_fqns(CASE)
W1 = "layers.0.feed_forward.w1"


def trace(rank: int, **changes: object) -> RankTrace:
    return make_trace(CASE, rank, **changes)


def check(*traces: RankTrace, of: Case = CASE, **expected: object) -> list[Finding]:
    return fp8_on.check_fp8_on(of, run_of(*traces), make_witnesses(of, **expected))


def test_as_expected_whatever_the_number_of_scaled_matmuls() -> None:
    assert len(FQNS) == 4
    assert check(trace(0), trace(1)) == []
    assert check(trace(0, calls=(1, 99)), trace(1), scaled_mm_calls=7) == []


@given(st.sets(st.sampled_from([*FQNS, "output", "layers.0.attention.wq"])), st.integers(0, 1))
def test_any_other_set_of_linears_on_any_rank_fails_and_names_them(converted: set[str], rank: int) -> None:
    findings = check(trace(rank, converted_fqns=tuple(converted)), trace(1 - rank))  # in any order
    assert {fqn for finding in findings for fqn in fqns_of(finding)} == converted ^ set(FQNS)
    assert all(fqns_of(finding) == sorted(fqns_of(finding)) for finding in findings)
    assert {finding.rank for finding in findings} <= {rank} and len(findings) <= 2


def fqns_of(finding: Finding) -> list[str]:
    return str(finding.values["fqns"]).split(", ")


def test_linears_that_are_not_converted_are_one_finding_by_their_names_in_blocks() -> None:
    names = tuple(f"layers.{layer}.attention.{name}" for layer in range(2) for name in ("wk", "wo"))
    (finding,) = check(*(trace(rank, converted_fqns=()) for rank in (0, 1)), converted_fqns=names)
    assert finding.message == "4 of 4 linears were not converted to FP8 on ranks 0-1: wk, wo"


def test_what_is_converted_too_much_too_little_or_twice_is_named() -> None:
    (lacking,) = check(*(trace(rank, converted_fqns=FQNS[1:]) for rank in (0, 1)))
    assert (lacking.rule, lacking.module, lacking.ranks) == (fp8_on.NOT_CONVERTED.name, W1, (0, 1))
    (extra,) = check(trace(0), trace(1, converted_fqns=(*FQNS, "output")))
    assert (extra.rule, extra.module, extra.ranks) == (fp8_on.CONVERTED.name, "output", (1,))
    assert extra.verdict is Verdict.INVARIANT
    (finding,) = check(trace(0, converted_fqns=(*FQNS, FQNS[1], FQNS[0])), trace(1))
    assert (finding.rule, finding.module, fqns_of(finding)) == (fp8_on.TWICE.name, FQNS[0], sorted(FQNS[:2]))
    (finding,) = check(trace(0), trace(1, unmatched_filters=("wqq",)))
    assert (finding.rule, finding.values["entries"], finding.ranks) == (fp8_on.FILTERS.name, "wqq", (1,))
    (finding,) = check(trace(0, steps=()), trace(1, steps=()))
    assert (finding.rule, finding.rank, finding.ranks) == (fp8_on.NO_STEP.name, 0, (0, 1))


@pytest.mark.parametrize("calls", [(0, 0), (0, 12), (12, 0)])
def test_a_step_without_scaled_matmuls_is_found_on_its_rank(calls: tuple[int, int]) -> None:
    (finding,) = check(trace(0), trace(1, calls=calls))
    assert (finding.rule, finding.ranks) == (fp8_on.NOT_SCALED.name, (1,))
    (finding,) = check(trace(0, calls=calls), trace(1, calls=calls))
    assert (finding.rule, finding.rank, finding.ranks) == (fp8_on.NOT_SCALED.name, 0, (0, 1))


def test_the_order_of_ranks_does_not_matter() -> None:
    ranks = [
        trace(0, converted_fqns=()),
        trace(1, calls=(0, 12)),
        trace(2, virtual=()),
        trace(3, unmatched_filters=("x",)),
    ]
    assert check(*ranks) == check(*reversed(ranks))
    assert len(check(*ranks)) == 1 + 3


def test_nothing_to_compare_is_a_finding() -> None:
    assert [finding.rule for finding in check()] == ["fp8_on/no-rank"]
    nothing = check(*(trace(rank, converted_fqns=()) for rank in (0, 1)), converted_fqns=())
    assert [finding.rule for finding in nothing] == ["fp8_on/converts-nothing"]


def test_bf16_converts_nothing_and_runs_no_scaled_matmul() -> None:
    bf16 = make_case(tp=2, steps=2)
    good = make_trace(bf16)
    assert check(good, make_trace(bf16, 1), of=bf16) == []
    (finding,) = check(good, make_trace(bf16, 1, calls=(0, 1)), of=bf16)
    assert (finding.rule, finding.ranks) == (fp8_on.SCALED.name, (1,))
    assert len(check(trace(0), trace(1), of=bf16)) == 1 + 1


@pytest.mark.parametrize(
    ("recipe", "tp", "virtual", "good"),
    [
        ("tensorwise", 2, ("collectives", "scaled_mm"), True),
        ("tensorwise", 2, ("async_tp", "collectives", "scaled_mm"), True),
        ("tensorwise", 2, ("gloo", "scaled_mm"), True),
        ("tensorwise", 2, ("collectives",), False),
        ("tensorwise", 2, ("gloo",), False),
        ("tensorwise", 2, ("scaled_mm",), False),
        ("tensorwise", 1, ("scaled_mm",), True),
        ("tensorwise", 1, (), False),
        ("bf16", 2, ("collectives",), True),
        ("bf16", 2, ("gloo",), True),
        ("bf16", 2, (), False),
        ("bf16", 1, (), True),
    ],
)
def test_the_cpu_needs_its_stand_ins(recipe: Recipe, tp: int, virtual: tuple[str, ...], good: bool) -> None:
    of = make_case(recipe=recipe, tp=tp)
    assert (check(make_trace(of, virtual=virtual), of=of) == []) is good


@pytest.mark.parametrize(
    ("device", "arithmetic", "virtual", "wrong"),
    [
        ("NVIDIA H200", "", (), None),
        ("NVIDIA H200", "", ("scaled_mm",), (fp8_on.FOREIGN_PARTS, "NVIDIA H200")),
        ("NVIDIA H200", "exact", ("scaled_mm",), None),
        ("NVIDIA H200", "exact", (), (fp8_on.LACKS_PARTS, "scaled_mm")),
        ("NVIDIA H200", "exact", ("collectives", "scaled_mm"), (fp8_on.FOREIGN_PARTS, "NVIDIA H200")),
        ("NVIDIA H200", "kernel", (), None),
        ("cpu", "kernel", ("collectives", "symm_mem"), None),
        ("cpu", "kernel", ("collectives", "scaled_mm"), (fp8_on.FOREIGN_PARTS, "cpu")),
        ("cpu", "kernel", (), (fp8_on.LACKS_PARTS, "collectives")),
    ],
)
def test_the_arithmetic_says_which_matmul_may_be_there(
    device: str, arithmetic: str, virtual: tuple[str, ...], wrong: tuple[Rule, str] | None
) -> None:
    findings = check(trace(0, device=device, arithmetic=arithmetic, virtual=virtual))
    key_of_rule = {fp8_on.LACKS_PARTS.name: "parts", fp8_on.FOREIGN_PARTS.name: "device"}
    reported = [(finding.rule, finding.values[key_of_rule[finding.rule]]) for finding in findings]
    assert reported == ([] if wrong is None else [(wrong[0].name, wrong[1])])


def test_the_words_about_the_virtual_device() -> None:
    for virtual, found in (((), "nothing"), (("x", "a"), "a, x")):
        (finding,) = check(trace(0, virtual=virtual), trace(1, virtual=virtual[::-1]))
        assert (finding.rule, finding.ranks, finding.found) == (fp8_on.LACKS_PARTS.name, (0, 1), found)
        assert finding.values["parts"] == finding.expected == "collectives, scaled_mm"


CALLS = 12


def counted(*traces: RankTrace) -> list[Finding]:
    return fp8_on.check_matmuls(CASE, run_of(*traces), make_witnesses(CASE))


@pytest.mark.parametrize(
    ("axes", "calls"),
    [
        ({}, 0),
        ({"recipe": "tensorwise"}, 3 * 14),
        ({"recipe": "rowwise_with_gw_hp"}, 2 * 14),
        ({"recipe": "rowwise", "checkpointing": "full"}, 4 * 14),
    ],
)
def test_the_number_is_that_of_the_formula(axes: dict[str, object], calls: int) -> None:
    of = make_case(**axes)
    assert fp8_on.check_matmuls(of, make_run(of, calls=calls), make_witnesses(of)) == []
    assert fp8_on.check_matmuls(of, make_run(of, calls=calls + 1), make_witnesses(of))
    assert fp8_on.check_matmuls(
        of, make_run(of, calls=calls), make_witnesses(of, scaled_mm_calls=(calls + 1, calls + 1))
    )


@given(st.integers(0, 1), st.integers(0, 1), st.integers(0, 50).filter(lambda count: count != CALLS))
def test_any_other_number_of_calls_at_any_step_and_rank_fails(rank: int, index: int, count: int) -> None:
    calls = [count if at == index else CALLS for at in range(2)]
    (finding,) = counted(trace(rank, calls=calls), trace(1 - rank))
    assert (finding.step, finding.rank, finding.verdict) == (index + 1, rank, Verdict.INVARIANT)
    assert finding.expected == f"{CALLS} calls a step" and finding.found == f"{count} calls"


def test_ranks_that_agree_share_a_finding_and_the_first_step_is_named() -> None:
    (finding,) = counted(trace(0, calls=(9, 9)), trace(1, calls=(9, 3)))
    assert (finding.rule, finding.step, finding.ranks) == (fp8_on.NUMBER.name, 1, (0, 1))
    assert dict(finding.values) == {"calls": 9, "wanted": "12"}
    first, second = counted(trace(1, calls=(12, 3)), trace(0, calls=(9, 9)))
    assert (first.step, first.rank, second.step, second.rank) == (1, 0, 2, 1)
