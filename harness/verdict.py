"""Verdicts and findings: how a case ended, and what is wrong with it. And the exit code of a run of many cases."""

import enum
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from harness.text import filled

# What the losses of a case were compared with: a golden on disk, a BF16 reference run for want of one, or nothing.
GoldenSource = Literal["stored", "run here", ""]


class Verdict(enum.Enum):
    """How a case ended. The value is the name used in every report."""

    PASSED = "passed"
    NUMERIC = "numeric"  # a number is outside its tolerance: loss, gradient, parameter
    INVARIANT = "invariant"  # another check failed: shapes, scales, conversion, traffic, graphs, missing references
    CHANGED = "changed"  # differs from a formula, with versions of torch or torchao that nobody verified it with
    CRASH = "crash"  # a rank raised, exited or died of what it did
    HANG = "hang"  # the deadline passed
    INFRA = "infra"  # the harness or the machine failed, not the case; what the machine ended was run twice
    KNOWN = "known"  # failed exactly as recorded for an upstream fault
    UNEXPECTED_PASS = "unexpected_pass"  # passed although an upstream fault is recorded: the record must be closed
    NOT_RUN = "not_run"  # selected but never started

    @property
    def good(self) -> bool:
        """Return True if nothing needs to be fixed."""
        return self in (Verdict.PASSED, Verdict.KNOWN)

    @property
    def phrase(self) -> str:
        """Return what it means, as the end of a sentence that starts with the case id."""
        return _PHRASES[self]


_PHRASES = {
    Verdict.PASSED: "passed every check",
    Verdict.NUMERIC: "computed wrong numbers",
    Verdict.INVARIANT: "broke an invariant",
    Verdict.CHANGED: "disagrees with a formula that is unverified for these versions",
    Verdict.CRASH: "crashed",
    Verdict.HANG: "did not finish in time",
    Verdict.INFRA: "could not be run: the machine or the harness failed",
    Verdict.KNOWN: "failed as recorded for a bug of torch or torchao",
    Verdict.UNEXPECTED_PASS: "passed, although a known issue says it must fail",
    Verdict.NOT_RUN: "was not run",
}


class ExitCode(enum.IntEnum):
    """The stable exit codes of the command line."""

    GOOD = 0
    FAILED = 1
    USAGE = 2
    NOTHING_RAN = 3
    INFRA = 4
    CHANGED = 5  # nothing is worse than a difference from what holds with verified versions
    NOT_COMPARED = 6  # of `compare`: there was nothing to decide by
    INTERRUPTED = 130


def check_of(rule: str) -> str:
    """Return the check that a rule belongs to, by its name."""
    return rule.partition("/")[0]


Value = str | int | float  # of a finding; numbers where something is compared or counted


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that is wrong: the rule that is broken, where, what was expected and what was found.

    `fp8-harness explain RULE` has the meaning of a rule, its usual causes and what to do.

    Everything that decides reads the rule, the place and the numbers. The sentence, filled into `says`, is for people.
    `size` is how far off it is: relative for gradients and parameters, nats for a loss. `judged` is false where a check
    lacks something, such as a golden, and nothing was found wrong. `formula` is the one that it contradicts.
    """

    rule: str  # "scales/amax": the check and what is wrong, or "engine/..." for ranks that did not finish
    says: str  # the template of its sentence (`text.py`), filled in from `values` and the place
    values: Mapping[str, Value] = {}
    judged: bool = True
    verdict: Verdict = Verdict.INVARIANT  # of the case, if this is its worst finding: NUMERIC or INVARIANT
    step: int | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()  # all that show it, where they were compared
    module: str | None = None  # FQN
    operand: str = ""  # of the module: "weight in forward"
    expected: str | None = None
    found: str | None = None
    size: float | None = None  # None: no distance
    fix: str | None = None  # what to do about it, where that is known
    formula: str = ""  # of `expect/`; empty if it breaks a rule that no version may break
    differs: str = ""  # "torch 2.16.0 differs from what holds since 2.13.0", where that was not verified here
    within: str = ""  # the run that it is about, where that is not the run of the case: "with cases/fixes/a.py:apply"
    notes: tuple[str, ...] = ()  # what explains it
    details: str = ""  # further lines, such as a table

    def __hash__(self) -> int:
        return hash((self.rule, self.step, self.rank, self.module, self.operand, self.expected, self.found))

    @property
    def check(self) -> str:
        """Return the check that found it, or "engine" or "judge"."""
        return check_of(self.rule)

    @property
    def place(self) -> str:
        """Return where it is, as far as the sentence does not say it: "step 3, rank 1"."""
        rank = None if "{ranks}" in self.says else self.rank
        parts = (("step", self.step), ("rank", rank), ("module", self.module), ("operand", self.operand or None))
        named_parts = (
            f"{name} {value}" for name, value in parts if value is not None and f"{{{name}}}" not in self.says
        )
        return ", ".join(named_parts)

    @property
    def message(self) -> str:
        """Return the sentence, after what is to be known first, with what explains it, and the details below."""
        own = {name: getattr(self, name) for name in ("step", "rank", "ranks", "module", "operand")}
        sentence = "; ".join([filled(self.says, {**own, **self.values}), *self.notes])
        before = filter(None, (self.differs, self.within, "" if self.judged else "not checked"))
        line = ": ".join([*before, sentence])
        return f"{line}\n{self.details}" if self.details else line

    @property
    def first_line(self) -> str:
        """Return the first line of the message."""
        return self.message.partition("\n")[0]

    @property
    def excess(self) -> float | None:
        """Return how many times the allowed distance it is; None if it is none, or where nothing at all is allowed."""
        distance, allowed = self.values.get("distance"), self.values.get("allowed")
        if not isinstance(distance, int | float) or not isinstance(allowed, int | float) or not allowed:
            return None
        return distance / allowed


class FailureSignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a failure is, the same on every rank and machine, and in every run of the case.

    `kind` is "crash", "hang" or the rule that is broken, `what` the exception, or the values that tell failures of the
    rule apart. `where`: the innermost calls of torch and torchao, or the kind of module and its operand.
    """

    kind: str
    what: str = ""
    where: tuple[str, ...] = ()
    first_step: int | None = None  # None: before the first step, or of no step

    @property
    def check(self) -> str:
        """Return the check that found it; empty for a crash or a hang."""
        check, rule, _ = self.kind.partition("/")
        return check if rule else ""

    @property
    def text(self) -> str:
        """Return one line that people read."""
        what = f": {self.what}" if self.what else ""
        at = f" in {', '.join(self.where)}" if self.where else ""
        step = f", from step {self.first_step} on" if self.first_step is not None else ""
        return f"{self.kind}{what}{at}{step}"


class NotJudged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A check that was not executed, and why.

    `unverified`: it applies to the case, but nothing was recorded with the installed versions.
    """

    check: str
    reason: str
    unverified: bool = False


def exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    """Return the exit code of a run. A run in which nothing ran has its own.

    Failed cases outrank infrastructure failures, and those what only differs from an unverified formula.
    """
    if not any(verdict is not Verdict.NOT_RUN for verdict in verdicts):
        return ExitCode.NOTHING_RAN
    bad = [verdict for verdict in verdicts if not verdict.good]
    if any(verdict not in (Verdict.INFRA, Verdict.CHANGED) for verdict in bad):
        return ExitCode.FAILED
    if Verdict.INFRA in bad:
        return ExitCode.INFRA
    return ExitCode.CHANGED if bad else ExitCode.GOOD
