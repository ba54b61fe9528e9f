"""Verdicts and findings: how a case ended, and what is wrong with it.

Owns the closed list of verdicts, their order of severity and how a run of many cases reduces to an exit code.
"""

from __future__ import annotations

import enum

import msgspec


class Verdict(enum.Enum):
    """How a case ended. The value is the name used in every report."""

    PASSED = "passed"
    NUMERIC = "numeric"  # a number is off: loss, gradient, parameter
    INVARIANT = "invariant"  # a rule is broken: shapes, scales, conversion, wire, graph
    CRASH = "crash"  # a rank raised, exited or was killed
    HANG = "hang"  # the deadline passed
    INFRA = "infra"  # the harness or the machine failed, not the case; the only verdict that is retried
    KNOWN = "known"  # failed exactly as a recorded upstream fault says
    UNEXPECTED_PASS = "unexpected_pass"  # a recorded fault is gone: the record must be closed
    NOT_RUN = "not_run"  # asked for but never started: interrupted, or no witness

    @property
    def good(self) -> bool:
        """True when nothing has to be done about it."""
        return self in (Verdict.PASSED, Verdict.KNOWN)

    @property
    def phrase(self) -> str:
        """What it means, as the end of the sentence 'the case ...'."""
        return _PHRASES[self]


_PHRASES = {
    Verdict.PASSED: "passed every check",
    Verdict.NUMERIC: "computed wrong numbers",
    Verdict.INVARIANT: "broke a rule that must always hold",
    Verdict.CRASH: "crashed",
    Verdict.HANG: "did not finish in time",
    Verdict.INFRA: "could not be run: the machine or the harness failed",
    Verdict.KNOWN: "failed as its recorded upstream fault says",
    Verdict.UNEXPECTED_PASS: "passed although a fault is recorded for it",
    Verdict.NOT_RUN: "was not run",
}


class ExitCode(enum.IntEnum):
    """The stable exit codes of the command line."""

    GOOD = 0
    FAILED = 1
    USAGE = 2
    NOTHING_RAN = 3
    INFRA = 4
    INTERRUPTED = 130


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that is wrong: which check saw it, where, what it expected and what it found."""

    check: str
    message: str
    verdict: Verdict = Verdict.INVARIANT  # what this finding makes of the case: NUMERIC or INVARIANT
    step: int | None = None
    rank: int | None = None
    module: str | None = None  # FQN of the module the finding is about
    expected: str | None = None
    found: str | None = None


def exit_code(verdicts: list[Verdict]) -> ExitCode:
    """Reduce a run to its exit code. Real failures outrank infrastructure; nothing run is a failure of its own."""
    if not any(verdict is not Verdict.NOT_RUN for verdict in verdicts):
        return ExitCode.NOTHING_RAN
    bad = [verdict for verdict in verdicts if not verdict.good]
    if any(verdict is not Verdict.INFRA for verdict in bad):
        return ExitCode.FAILED
    return ExitCode.INFRA if bad else ExitCode.GOOD
