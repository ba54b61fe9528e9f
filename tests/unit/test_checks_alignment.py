"""The check `alignment`: a misaligned matmul is refused by every rank, and only such a one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks import fp8_on
from harness.matrix.rules import Refusal
from harness.trace import RankFailure, RankTrace
from harness.verdict import Finding
from tests.builders import make_case, make_failure, make_refusal, make_trace, make_witnesses, run_of

CASE = make_case(tp=2)

MESSAGE = "RuntimeError: Expected both dimensions of mat2 to be divisible by 16 but got torch.Size([128, 1128])"
REFUSAL = make_refusal()


def failure(rank: int, message: str = MESSAGE, **changes: object) -> RankFailure:
    return make_failure(rank, message, **changes)


def trace(rank: int) -> RankTrace:
    return make_trace(CASE, rank)


def check(*ends: RankFailure | RankTrace, refusal: Refusal | None = REFUSAL) -> list[Finding]:
    return fp8_on.check_alignment(CASE, run_of(*ends), make_witnesses(CASE, refusal=refusal))


def test_a_refusal_on_every_rank_and_a_run_that_trains_as_it_should_have_no_findings() -> None:
    assert check(failure(0), failure(1)) == []
    assert check(failure(0, "SIGKILL", kind="signaled", consequence=True), failure(1)) == []
    assert check(trace(0), trace(1), refusal=None) == []


def test_ranks_that_train_or_end_without_a_refusal_are_found() -> None:
    (finding,) = check(trace(0), trace(1))
    assert (finding.rule, finding.rank, finding.ranks) == (fp8_on.TRAINED.name, 0, (0, 1))
    (finding,) = check(failure(0), trace(1))
    assert (finding.rule, finding.ranks) == (fp8_on.TRAINED.name, (1,))
    (finding,) = check(failure(0))
    assert (finding.rule, finding.ranks) == (fp8_on.NO_END.name, (1,))
    (finding,) = check()
    assert (finding.rule, finding.rank, finding.ranks) == (fp8_on.NO_END.name, 0, (0, 1))
    (finding,) = check(failure(0, consequence=True), failure(1, consequence=True))
    assert finding.rule == fp8_on.NONE_REFUSED.name


@pytest.mark.parametrize(
    "other",
    [
        failure(1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        failure(1, "RuntimeError: Expected self.size(1) to be divisible by 16, but got self.size(1)=1128"),
        failure(1, "SIGSEGV", kind="signaled"),
        failure(1, MESSAGE, kind="garbled"),
        failure(1, "", kind="stuck"),
    ],
)
def test_failing_differently_is_found_with_what_was_expected(other: RankFailure) -> None:
    (finding,) = check(failure(0), other)
    assert (finding.rule, finding.rank, finding.values["refusal"]) == (fp8_on.OTHER_ERROR.name, 1, REFUSAL.name)
    assert (finding.values["pattern"], finding.expected) == (REFUSAL.pattern, f"an error: {REFUSAL.reason}")
    assert finding.found == f"{other.kind}: {other.message}"


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        "RuntimeError: Expected self.size(1) to be divisible by 16, but got self.size(1)=1128",
        "RuntimeError: Expected mat_a stride along 0 dim to be multiple of 16 bytes, got 3.",
        "AssertionError: columns must be divisible by inner block size",
        "AssertionError: rows must be a multiple of 32",
    ],
)
def test_refusing_an_aligned_matmul_is_found(message: str) -> None:
    (finding,) = check(failure(1, message), failure(0, "x", consequence=True), refusal=None)
    assert (finding.rule, finding.ranks) == (fp8_on.REFUSED_ALIGNED.name, (1,))
    assert (finding.rank, finding.found) == (1, message)


@pytest.mark.parametrize("message", ["ValueError: no", "RuntimeError: must be divisible by 160", ""])
def test_other_failures_are_not_its_business(message: str) -> None:
    assert check(failure(0, message), failure(1, message), refusal=None) == []
    assert check(failure(0, MESSAGE, consequence=True), refusal=None) == []


@given(st.permutations([failure(0), failure(1, "SIGSEGV", kind="signaled"), trace(0), failure(0, "x")]))
def test_the_order_of_ranks_does_not_matter(ends: list[RankFailure | RankTrace]) -> None:
    assert set(check(*ends)) == set(check(*reversed(ends)))


def test_of_a_model_that_is_not_known_nobody_says_that_it_is_aligned() -> None:
    case = replace(CASE, target="mine")
    (finding,) = fp8_on.check_alignment(case, run_of(failure(1), failure(0)), make_witnesses(case, refusal=None))
    assert (finding.rule, finding.rank, finding.ranks) == (fp8_on.REFUSED_SIZES.name, 0, (0, 1))
