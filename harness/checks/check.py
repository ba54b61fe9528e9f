"""The declaration of a check: what it asks, what it reads, when it applies, and the rules it finds broken.

Each stands in the file of its check. The judge, the order of causes, what is not judged, the probes of a case and the
reference of the checks are collected from these declarations (`catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from harness.checks.rule import Rule
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.trace import Run
from harness.verdict import Finding

CheckFunction = Callable[[Case, Run, Witnesses], list[Finding]]
Reason = Callable[[Expectations, str], str]  # of a case on a device (`RankTrace.device`); empty: there is none


def always(expect: Expectations, device: str) -> str:
    """No reason: for a check that applies to every case, and judges all of it."""
    del expect, device
    return ""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check. `function` is pure: a case, its run and its witnesses in, findings out.

    `question`: what it answers. `blind`: what it cannot see. `not_judged`: why it says nothing of a case whose records
    are there. `partly`: what it does not judge of a case that it judges.
    """

    name: str
    question: str
    blind: str
    function: CheckFunction
    rules: tuple[Rule, ...]
    not_judged: Reason = always
    partly: Reason = always
    record: str | None = None  # the field of `RankTrace` that it reads
    compiled_record: str | None = None  # the one that it reads of compiled runs, where it is another
    also_reads: tuple[str, ...] = ()  # other fields, which are compared where they are there
    formula: str | None = None  # the formula of `expect/` that it evaluates
    explains_failures: bool = False  # it also runs when ranks failed
    needs_linears: bool = False  # which, of a model that is not known, its single-rank reference tells
    needs_signature: bool = False  # it compares with what was recorded, where that was done with these versions
    needs_relation: bool = False  # it compares with a partner, which not every case has
    judges_partner: bool = False  # it judges the partner of a compiled case, whose modules cannot be recorded
    absent: str | None = None  # why ranks may lack the record, where they record it unasked

    @property
    def sight(self) -> str:
        """What it cannot see, as a sentence."""
        return f"It cannot see {self.blind[0].lower()}{self.blind[1:]}"

    def record_of(self, expect: Expectations) -> str | None:
        """The field of `RankTrace` that it reads of a run; None where it reads none, or the partner's."""
        if self.judges_partner and expect.stands_for_modules:
            return None
        return self.compiled_record or self.record if expect.case.compile != "none" else self.record

    def asks(self, expect: Expectations) -> tuple[str, ...]:
        """The fields of `RankTrace` that ranks must be asked to fill for it."""
        record = self.record_of(expect)
        return (*([] if record is None or self.absent is not None else [record]), *self.also_reads)

    def reads(self, expect: Expectations) -> tuple[str, ...]:
        """Every field of `RankTrace` that it reads, of a run or of its partner."""
        record = self.record_of(expect) or self.record
        return (*([] if record is None else [record]), *self.also_reads)

    def says_nothing_of(self, expect: Expectations, device: str) -> str:
        """Why it can say nothing of a case on a device although its records are there; empty where it can."""
        reason = self.not_judged(expect, device)
        if not reason and self.needs_linears and expect.model is None:
            return "the single-rank reference, which tells the linears, did not run"
        return reason
