"""Verdicts, exit codes, and the signature of a failure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.catalogue import normalized, signature_of
from harness.checks.fp8_on import NOT_SCALED
from harness.checks.parity import GRAD_NORM, GRADIENTS
from harness.checks.scales import RULES
from harness.checks.traffic import AMAX_MISSING
from harness.trace import RankFailure, Run
from harness.verdict import ExitCode, Finding, Verdict, exit_code
from tests.builders import a_finding, make_trace, run_of


def test_only_passed_and_known_are_good_and_every_verdict_has_a_phrase_of_its_own() -> None:
    assert {verdict for verdict in Verdict if verdict.good} == {Verdict.PASSED, Verdict.KNOWN}
    assert len({verdict.phrase for verdict in Verdict}) == len(Verdict)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], ExitCode.NOTHING_RAN),
        ([Verdict.NOT_RUN], ExitCode.NOTHING_RAN),
        ([Verdict.PASSED, Verdict.NOT_RUN], ExitCode.FAILED),
        ([Verdict.INFRA], ExitCode.INFRA),
        ([Verdict.PASSED, Verdict.INFRA], ExitCode.INFRA),
        ([Verdict.INFRA, Verdict.CRASH], ExitCode.FAILED),
        ([Verdict.UNEXPECTED_PASS], ExitCode.FAILED),
        ([Verdict.CHANGED, Verdict.PASSED], ExitCode.CHANGED),
        ([Verdict.CHANGED, Verdict.INFRA], ExitCode.INFRA),
        ([Verdict.CHANGED, Verdict.NUMERIC], ExitCode.FAILED),
    ],
)
def test_exit_code(verdicts: list[Verdict], code: ExitCode) -> None:
    assert exit_code(verdicts) is code


def test_exit_code_does_not_depend_on_the_order_and_no_bad_verdict_ends_good() -> None:
    for pair in itertools.product(Verdict, repeat=2):
        assert exit_code(list(pair)) is exit_code(list(reversed(pair)))
        assert (exit_code(list(pair)) is ExitCode.GOOD) == all(verdict.good for verdict in pair)


TRACEBACK = """Traceback (most recent call last):
  File "/v/site-packages/torch/nn/modules/module.py", line 17{n}, in _call_impl
  File "/home/me/{n}/train.py", line 3, in forward
  File "/v/site-packages/torchao/float8/float8_linear.py", line 2{n}, in forward
  File "/v/site-packages/torch/_ops.py", line 8, in __call__
  File "/v/site-packages/torchao/float8/float8_ops.py", line 31, in addmm_float8
  File "/v/site-packages/harness/worker/virtual/scaled_mm.py", line 90, in scaled_mm
RuntimeError: sizes
"""


def raised(message: str, *, rank: int = 0, n: int = 1, phase: str = "step 2", consequence: bool = False) -> RankFailure:
    return RankFailure(
        rank=rank, kind="raised", message=message, traceback=TRACEBACK.format(n=n), phase=phase, consequence=consequence
    )


def crash(*failures: RankFailure) -> str:
    signature = signature_of(Verdict.CRASH, (), Run(traces=(), failures=failures))
    assert signature is not None
    return signature.text


def of_finding(finding: Finding) -> str:
    signature = signature_of(Verdict.INVARIANT, (finding,), run_of(make_trace()))
    assert signature is not None
    return signature.text


def test_a_crash_is_its_exception_and_the_calls_of_the_field() -> None:
    text = crash(raised("RuntimeError: mat1 is (8x1128) at 0x7f12, see /tmp/a/b.py"))
    assert text == (
        "crash: RuntimeError: mat1 is (8x1128) at …, see … in torchao.float8.float8_linear:forward, "
        "torchao.float8.float8_ops:addmm_float8, from step 2 on"
    )


@given(rank=st.integers(0, 7), n=st.integers(0, 9), size=st.integers(1, 10**6))
def test_a_crash_is_the_same_on_every_rank_and_machine(rank: int, n: int, size: int) -> None:
    assert crash(raised(f"RuntimeError: size {size}", rank=rank, n=n)) == crash(raised("RuntimeError: size 7"))


@pytest.mark.parametrize(
    "other", [raised("ValueError: size 7"), raised("RuntimeError: size 7", phase="build"), raised("RuntimeError: no")]
)
def test_another_crash_has_another_signature(other: RankFailure) -> None:
    assert crash(other) != crash(raised("RuntimeError: size 7"))


def test_consequences_single_ranks_and_the_order_of_ranks_do_not_decide() -> None:
    cause = [raised("RuntimeError: a", rank=rank) for rank in (1, 2)]
    others = [raised("RuntimeError: b", rank=0), raised("RuntimeError: c", rank=3, consequence=True)]
    assert crash(*others, *cause) == crash(*cause)
    message = "CollectiveMismatch: ranks of one process group disagree: group rank {} calls {}, group rank {} calls {}"
    one, other = "all_gather of 55 bytes", "all_reduce of 4 bytes"
    assert crash(raised(message.format(0, one, 1, other))) == crash(raised(message.format(0, other, 3, one)))


def test_a_hang_is_where_ranks_wait() -> None:
    stack = (
        'Thread 0x7f (most recent call first):\n  File "/v/torch/distributed/distributed_c10d.py", line 9 in barrier'
    )
    stuck = RankFailure(rank=0, kind="stuck", message="", traceback=stack, phase="step 3", consequence=False)
    signature = signature_of(Verdict.HANG, (), Run(traces=(), failures=(stuck,)))
    assert signature is not None
    assert (signature.kind, signature.what, signature.first_step) == ("hang", "barrier", 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (AMAX_MISSING.finding(axis="tp", missing=3, ranks=[0, 1]), AMAX_MISSING.finding(axis="tp", missing=1)),
        (GRAD_NORM.finding(distance=0.8, allowed=2e-11, rank=0), GRAD_NORM.finding(distance=9.0, allowed=2e-11)),
        (GRADIENTS.finding(count=2, module="a.b"), GRADIENTS.finding(count=1, module="c")),
        (NOT_SCALED.finding(ranks=range(4)), NOT_SCALED.finding(ranks=[0])),
    ],
)
def test_sizes_and_places_do_not_matter(one: Finding, other: Finding) -> None:
    assert of_finding(one) == of_finding(other)


def test_values_of_a_rule_the_kind_of_module_and_the_operand_tell_failures_apart() -> None:
    along_tp, along_dp = (of_finding(AMAX_MISSING.finding(axis=axis, missing=1)) for axis in ("tp", "dp_shard"))
    assert (along_tp, along_dp) == ("traffic/amax-missing: tp", "traffic/amax-missing: dp_shard")

    def at(module: str, operand: str = "weight in forward") -> str:
        return of_finding(RULES.amax.finding(module=module, operand=operand, step=1))

    first = at("layers.0.attention.wq")
    assert first == at("layers.11.attention.wq")
    assert first == "scales/amax in layers.*.attention.wq, weight in forward, from step 1 on"
    assert first not in (at("layers.0.attention.wk"), at("layers.0.attention.wq", "input in forward"))


def test_what_did_not_fail_has_no_signature_and_an_expected_refusal_has_one() -> None:
    finding = a_finding(check="scales", message="scale")
    for verdict in (Verdict.INFRA, Verdict.NOT_RUN):
        assert signature_of(verdict, (finding,), None) is None
    assert signature_of(Verdict.PASSED, (), run_of(make_trace())) is None
    unjudged = replace(finding, judged=False)
    assert signature_of(Verdict.INVARIANT, (unjudged,), run_of(make_trace())) is None
    assert signature_of(Verdict.KNOWN, (finding,), run_of(make_trace())) is not None
    refused = Run(traces=(), failures=(raised("RuntimeError: size 7"),))
    assert signature_of(Verdict.PASSED, (), refused) == signature_of(Verdict.CRASH, (), refused)


@given(st.text(max_size=400))
def test_any_message_is_normalized_once(text: str) -> None:
    once = normalized(text)
    assert len(once) <= 300
    assert "\n" not in once
