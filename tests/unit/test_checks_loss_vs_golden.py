"""The check `loss_vs_golden`."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.loss_vs_golden import (
    COARSE,
    DATA,
    DISAGREE,
    FAMILY,
    FROZEN,
    HARDWARE,
    NO_GOLDEN,
    NO_TOLERANCE,
    PROVES_NOTHING,
    STEPS_OF_RANKS,
    check_loss_vs_golden,
)
from harness.checks.loss_vs_golden import LOSS as TOO_FAR
from harness.checks.loss_vs_golden import STEPS as OTHER_STEPS
from harness.evidence.golden import Golden
from harness.evidence.tolerance import NONE_DERIVED, Tolerance
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, reference_case
from harness.trace import RankTrace
from harness.verdict import Finding, Verdict
from tests.builders import make_case, make_golden, make_tolerance, make_trace, make_witnesses, run_of

# Powers of two: sums and differences of these numbers are exact, so the bound itself can be tested.
GOLDEN = (8.0, 7.5, 7.25, 7.0)
ALLOWED = (0.125, 0.125, 0.25, 0.5)
STEPS = len(GOLDEN)
CASE = make_case(tp=2, steps=STEPS)


def golden(losses: tuple[float, ...] = GOLDEN, **changes: object) -> Golden:
    return make_golden(CASE, losses, **changes)


def trace(rank: int, losses: tuple[float, ...] = GOLDEN, **changes: object) -> RankTrace:
    return make_trace(CASE, rank, losses=losses, **changes)


STORED, WITHIN = golden(), make_tolerance(*ALLOWED)


def check(
    *traces: RankTrace, against: Golden | None = STORED, within: Tolerance | None = WITHIN, of: Case = CASE
) -> list[Finding]:
    return check_loss_vs_golden(of, run_of(*traces), make_witnesses(of, golden=against, tolerance=within))


def both(losses: tuple[float, ...]) -> tuple[RankTrace, RankTrace]:
    return trace(0, losses), trace(1, losses)


def moved(step: int, by: float) -> tuple[float, ...]:
    return tuple(loss + by if number == step else loss for number, loss in enumerate(GOLDEN, 1))


steps = st.integers(1, STEPS)
signs = st.sampled_from([-1.0, 1.0])


def test_the_golden_itself_passes_and_a_deviation_on_a_high_rank_alone_does_not() -> None:
    assert check(*both(GOLDEN)) == []
    findings = check(trace(0), trace(1, moved(3, 1.0)))
    assert {finding.verdict for finding in findings} == {Verdict.INVARIANT, Verdict.NUMERIC}
    assert {finding.rank for finding in findings} == {1}


@given(st.tuples(*(st.floats(-0.999 * allowed, 0.999 * allowed) for allowed in ALLOWED)))
def test_noise_below_the_bound_never_fails(noise: tuple[float, ...]) -> None:
    losses = tuple(loss + delta for loss, delta in zip(GOLDEN, noise, strict=True))
    assume(len(set(losses)) > 1)
    assert check(*both(losses)) == []


@given(steps, signs)
def test_exactly_the_bound_passes(step: int, sign: float) -> None:
    assert check(*both(moved(step, sign * ALLOWED[step - 1]))) == []


@given(steps, signs, st.floats(1.0001, 1e6))
def test_a_deviation_above_the_bound_always_fails_and_is_located(step: int, sign: float, times: float) -> None:
    (finding,) = check(*both(moved(step, sign * times * ALLOWED[step - 1])))
    assert (finding.step, finding.verdict) == (step, Verdict.NUMERIC)
    assert (finding.rank, finding.ranks) == (None, ())  # the number of all ranks


@given(steps, signs, st.integers(0, 1), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_never_passes(step: int, sign: float, rank: int, value: float) -> None:
    losses = tuple(value if number == step else loss for number, loss in enumerate(GOLDEN, 1))
    assert check(*both(losses))
    assert check(trace(rank, losses), trace(1 - rank))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_golden_or_tolerance_that_is_not_finite_does_not_wave_nan_through(value: float) -> None:
    assert check(*both((8.0, math.nan, 7.25, 7.0)), against=golden((8.0, math.nan, 7.25, 7.0)))
    assert check(*both((8.0, math.nan, 7.25, 7.0)), within=make_tolerance(0.1, value, 0.1, 0.1))
    assert check(*both(GOLDEN), within=make_tolerance(0.1, value, 0.1, 0.1))


@given(steps, st.integers(0, 1), signs)
def test_ranks_that_differ_in_the_last_bit_fail(step: int, rank: int, sign: float) -> None:
    odd = list(GOLDEN)
    odd[step - 1] = math.nextafter(odd[step - 1], sign * math.inf)
    (finding,) = check(trace(rank, tuple(odd)), trace(1 - rank))
    assert (finding.rule, finding.step, finding.rank) == (DISAGREE.name, step, 1)
    assert repr(odd[step - 1]) in (finding.found or "")


@given(st.permutations(range(4)), st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_the_order_of_ranks_does_not_matter(order: list[int], noise: list[float]) -> None:
    traces = [trace(rank, moved(2, delta)) for rank, delta in enumerate(noise)]
    assert check(*(traces[index] for index in order)) == check(*traces)


@given(steps, st.integers(0, 1))
def test_dropping_any_step_on_any_rank_fails(step: int, rank: int) -> None:
    whole = trace(rank)
    dropped = replace(whole, steps=tuple(record for record in whole.steps if record.step != step))
    (finding,) = check(dropped, trace(1 - rank))
    assert (finding.rule, finding.ranks) == (STEPS_OF_RANKS.name, (rank,))


@pytest.mark.parametrize(
    ("against", "within", "who"),
    [
        (golden(GOLDEN[:-1]), WITHIN, "golden"),
        (golden((*GOLDEN, 6.9)), WITHIN, "golden"),
        (golden(()), WITHIN, "golden"),
        (golden(), make_tolerance(*ALLOWED[:-1]), "tolerance"),
        (golden(), make_tolerance(*ALLOWED, 1.0), "tolerance"),
    ],
)
def test_witnesses_with_other_steps_fail(against: Golden, within: Tolerance, who: str) -> None:
    (finding,) = check(*both(GOLDEN), against=against, within=within)
    assert (finding.rule, finding.values["who"]) == (OTHER_STEPS.name, who)


def test_a_missing_golden_names_its_command_and_a_missing_tolerance_says_why() -> None:
    (finding,) = check(*both(GOLDEN), against=None)
    assert (finding.rule, finding.judged, finding.values["family"]) == (NO_GOLDEN.name, False, family_id(CASE))
    command = f"fp8-harness baseline update {case_id(reference_case(CASE))} --device cpu --reason"
    assert command in str(finding.values["command"])
    (finding,) = check(*both(GOLDEN), within=None)
    assert (finding.rule, finding.judged, finding.values["why"]) == (NO_TOLERANCE.name, False, NONE_DERIVED)


def test_a_golden_of_other_hardware_is_not_used() -> None:
    (finding,) = check(trace(0, device="NVIDIA H200"), trace(1, device="NVIDIA H200"))
    assert (finding.rule, finding.ranks) == (HARDWARE.name, (0, 1))
    assert (finding.expected, finding.found) == ("cpu", "nvidia-h200")
    (finding,) = check(trace(0), trace(1, device="NVIDIA H200"))
    assert finding.rank == 1
    assert check(trace(0, device=""), trace(1))
    of_class = golden(hardware="sm90")
    h200, h100 = (trace(rank, device=name, architecture="sm90") for rank, name in enumerate(("NVIDIA H200", "H100")))
    assert check(h200, h100, against=of_class) == []
    (finding,) = check(h200, trace(1, device="AMD Instinct MI300X", architecture="gfx942"), against=of_class)
    assert (finding.rank, finding.expected, finding.found) == (1, "sm90", "amd-instinct-mi300x")


def test_other_data_another_family_and_other_steps_fail() -> None:
    (finding,) = check(trace(0), trace(1, data_digest="d2"))
    assert (finding.rule, finding.ranks) == (DATA.name, (1,))
    (finding,) = check(*both(GOLDEN), against=golden(family="other"))
    assert finding.rule == FAMILY.name
    whole = trace(0)
    assert check(replace(whole, steps=tuple(reversed(whole.steps))))
    assert check(*both((*GOLDEN, 6.9)))
    assert [finding.rule for finding in check()] == ["loss_vs_golden/no-rank"]
    assert check(*both(()))
    assert check(*both(()), against=golden(()), within=make_tolerance())


def test_a_loss_that_stands_still_fails_where_steps_can_show_learning() -> None:
    (finding,) = check(*both((7.75,) * STEPS), within=make_tolerance(*[0.75] * STEPS))
    assert (finding.rule, finding.ranks) == (FROZEN.name, (0, 1))
    two = make_case(tp=2, steps=2)
    against = make_golden(two, (8.0, 7.0))
    (finding,) = check(*both((7.5, 7.5)), of=two, against=against, within=make_tolerance(0.5, 0.5))
    assert finding.rule == FROZEN.name
    (finding,) = check(*both((8.0, 7.5)), of=two, against=against, within=make_tolerance(2.0, 1.0))
    assert finding.rule == PROVES_NOTHING.name
    assert (finding.expected, finding.found) == ("allowed below 1", "2")
    one = make_case(tp=2, steps=1)
    single = make_golden(one, (8.0,))
    assert check(*both((8.0,)), of=one, against=single, within=make_tolerance(0.125)) == []
    assert check(*both((8.5,)), of=one, against=single, within=make_tolerance(0.125))


def test_a_tolerance_as_wide_as_all_learning_proves_nothing_but_a_loss_outside_of_it_fails() -> None:
    for width, good in ((1.0, False), (0.75, True)):
        findings = check(*both(GOLDEN), within=make_tolerance(*[width] * STEPS))
        assert (findings == []) is good
    (finding,) = check(*both(GOLDEN), within=make_tolerance(*[1.0] * STEPS))
    assert (finding.rule, finding.judged) == (PROVES_NOTHING.name, False)
    assert (finding.expected, finding.found) == ("allowed below 1", "1")
    (finding,) = check(*both((8.0, 7.5, 7.25, 10.0)), within=make_tolerance(*[1.0] * STEPS))
    assert (finding.rule, finding.step) == (TOO_FAR.name, 4)


def test_the_message_is_an_aligned_table() -> None:
    (finding,) = check(*both((8.0, 7.5, 8.25, 9.0)))
    assert (finding.rule, finding.step) == (TOO_FAR.name, 3)
    assert dict(finding.values).items() >= {"difference": 1.0, "distance": 1.0, "allowed": 0.25}.items()
    assert finding.excess == 4
    columns, *rows, basis = finding.details.splitlines()
    assert columns.split() == ["step", "golden", "found", "difference", "allowed"]
    assert rows[2].split() == ["3", "7.250000", "8.250000", "+1.000000", "0.250000", "<"]
    assert len({row.removesuffix("  <").rindex("0") for row in rows}) == 1
    assert [row.endswith("<") for row in rows] == [False, False, True, True]
    assert basis == "2 of 4 steps outside the tolerance tiny-bf16-float32: samples"
    assert (finding.expected, finding.found) == ("7.25 ± 0.25", "8.25")


def test_a_long_table_shows_the_first_bad_step() -> None:
    long = make_case(tp=2, steps=100)
    losses = tuple(8.0 - number / 16 for number in range(100))
    off = tuple(loss + 1 if number == 70 else loss for number, loss in enumerate(losses, 1))
    against = make_golden(long, losses)
    (finding,) = check(*both(off), of=long, against=against, within=make_tolerance(*[0.125] * 100))
    assert finding.step == 70
    assert "(88 more steps)" in finding.details
    assert any(line.split()[0] == "70" and line.endswith("<") for line in finding.details.splitlines())


@pytest.mark.parametrize(("size", "fix"), [(1.0, COARSE), (1.001, "train more steps")])
def test_a_golden_of_coarse_losses_says_so(size: float, fix: str) -> None:
    """A bfloat16 near 8 is a multiple of 1/16 or 1/32: the tolerance that is derived from it is wide as well."""
    losses = tuple(size * loss for loss in GOLDEN)
    (finding,) = check(*both(losses), against=golden(losses), within=make_tolerance(*(2.0 for _ in GOLDEN)))
    assert (finding.rule, finding.values["remedy"]) == (PROVES_NOTHING.name, fix)
