"""Verdicts and exit codes."""

from __future__ import annotations

import itertools

import pytest

from harness.verdict import ExitCode, Verdict, exit_code


def test_only_passed_and_known_are_good() -> None:
    assert {verdict for verdict in Verdict if verdict.good} == {Verdict.PASSED, Verdict.KNOWN}


def test_every_verdict_has_a_phrase_of_its_own() -> None:
    assert len({verdict.phrase for verdict in Verdict}) == len(Verdict)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], ExitCode.NOTHING_RAN),
        ([Verdict.NOT_RUN], ExitCode.NOTHING_RAN),
        ([Verdict.PASSED], ExitCode.GOOD),
        ([Verdict.KNOWN], ExitCode.GOOD),
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


def test_exit_code_does_not_depend_on_the_order() -> None:
    for pair in itertools.product(Verdict, repeat=2):
        assert exit_code(list(pair)) is exit_code(list(reversed(pair)))


def test_no_bad_verdict_ends_good() -> None:
    for pair in itertools.product(Verdict, repeat=2):
        assert (exit_code(list(pair)) is ExitCode.GOOD) == all(verdict.good for verdict in pair)
