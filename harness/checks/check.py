"""A check: what it asks, what it reads, when it applies, the rules that it knows, and the evidence that it may use.

Each is declared in the file of its function, of which `Check` is the decorator. The judge, the order of causes, what
is not judged, the probes of a case and the reference of the checks are collected from there (`catalogue.py`).
"""

import inspect
from collections.abc import Callable, Iterable

import msgspec

from harness.checks.rule import Rule, Rules, Stage
from harness.checks.stacks import innermost_calls
from harness.evidence.golden import Golden
from harness.evidence.signature import Signature
from harness.evidence.tolerance import Tolerance
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.text import format_ranks
from harness.trace import Run
from harness.verdict import Finding

_CALLS = 3  # of the traceback of a witness that raised


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """What one case is judged by besides its run. None: not available, which is a finding of the check that needs it.

    `running/` collects it. A run that did not finish is kept with its failures, so that this finding says why.
    """

    expect: Expectations
    records: tuple[str, ...] = ()  # the fields of `RankTrace` that the ranks were asked to fill
    golden: Golden | None = None
    signature: Signature | None = None
    update_signature: str = ""  # the command that records one
    tolerance: Tolerance | None = None
    parity_tolerance: Tolerance | None = None
    reference: Run | None = None  # the BF16 reference that was run for want of a golden
    underived: Run | None = None  # the first BF16 run for a derived tolerance that did not finish
    solo: Run | None = None  # the run of the solo witness, the single-rank reference with the same recipe
    replay: Run | None = None  # this very run again, module by module on one rank
    partner: Run | None = None  # the run of `expect.relation.partner`
    partner_has_fix: bool = False  # partner and signature are of a run with the candidate fix, as the second run is


CheckFunction = Callable[[Case, Run, Witnesses], Iterable[Finding]]
Reason = Callable[[Expectations, str], str]  # of a case on a device (`RankTrace.device`); empty: there is none


def always(expect: Expectations, device: str) -> str:
    """No reason: for a check that applies to every case, and judges all of it."""
    return ""


class Check(msgspec.Struct, frozen=True):
    """Decorates a function: `@partial(Check, declares=…, blind=…)`. Its docstring begins with the question.

    The function is pure: a case, its run and its witnesses in, findings out. It is called where every rank has the
    `records`. `blind`: what it cannot see. `not_judged`: why it says nothing of a case whose records are there.
    `partly`: what it does not judge of a case that it judges.
    """

    function: CheckFunction
    declares: Rules
    blind: str
    not_judged: Reason = always
    partly: Reason = always
    records: tuple[str, ...] = ()  # the fields of `RankTrace` that it reads
    compiled_records: tuple[str, ...] = ()  # those that it reads of compiled runs, where they are others
    also_reads: tuple[str, ...] = ()  # other fields, which are compared where they are there
    unasked: str = ""  # the field that ranks fill unasked where they can
    absent: str = ""  # why ranks may lack that one
    formula: str | None = None  # the formula of `expect/` that it evaluates
    explains_failures: bool = False  # it also runs when ranks failed
    needs_linears: bool = False  # which, of a model that is not known, its single-rank reference tells
    needs_signature: bool = False  # it compares with what was recorded, where that was done with these versions
    needs_relation: bool = False  # it compares with a partner, which not every case has
    judges_partner: bool = False  # it judges the partner of a compiled case, whose modules cannot be recorded

    @property
    def name(self) -> str:
        return self.declares.check

    @property
    def question(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "").partition("\n")[0]

    @property
    def sight(self) -> str:
        return f"It cannot see {self.blind[0].lower()}{self.blind[1:]}"

    @property
    def no_record(self) -> Rule:
        """The rule that is broken where a rank lacks what it was asked to record."""
        says = "no record of {record} on {where}"
        return Rule(name=f"{self.name}/no-record", stage=Stage.RUN, says=says, judged=False)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*((self.no_record,) if self.records else ()), *self.declares.declared)

    def __call__(self, case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
        asked = self.records_of(witnesses.expect)
        lacking = {record: [trace.rank for trace in run.traces if getattr(trace, record) is None] for record in asked}
        missing = [
            self.no_record.finding(
                record=noun(record),
                where=format_ranks(ranks) if ranks else "any rank",
                ranks=ranks,
                expected=f"{noun(record)} of every rank",
            )
            for record, ranks in lacking.items()
            if ranks or not run.traces
        ]
        return missing or list(self.function(case, run, witnesses))

    def records_of(self, expect: Expectations) -> tuple[str, ...]:
        """The fields of `RankTrace` that ranks must have filled; none where it judges the partner."""
        if self.judges_partner and expect.stands_for_modules:
            return ()
        return self.compiled_records or self.records if expect.case.compile != "none" else self.records

    def asks(self, expect: Expectations) -> tuple[str, ...]:
        """The fields of `RankTrace` that ranks must be asked to fill for it."""
        return (*self.records_of(expect), *self.also_reads)

    def reads(self, expect: Expectations) -> tuple[str, ...]:
        """Every field of `RankTrace` that it reads, of a run or of its partner."""
        return (*(self.records_of(expect) or self.records), *self.also_reads, *filter(None, [self.unasked]))

    def says_nothing_of(self, expect: Expectations, device: str) -> str:
        """Why it can say nothing of a case on a device although its records are there; empty where it can."""
        reason = self.not_judged(expect, device)
        if not reason and self.needs_linears and expect.model is None:
            return "the single-rank reference, which shows the linears, did not run"
        return reason


def noun(record: str) -> str:
    """A field of `RankTrace` in words."""
    return record.replace("_", " ")


def finished(run: Run | None) -> Run | None:
    """The run; None where it did not finish."""
    return run if run is not None and run.complete else None


def why_unfinished(run: Run | None) -> str:
    """Why a run did not finish, as the end of a sentence: ": TypeError: ..."; empty where nothing is known of it."""
    causes = () if run is None else run.causes or run.failures
    return f": {causes[0].message.partition(chr(10))[0]}" if causes else ""


def unfinished(rule: Rule, who: str, run: Run | None, case_run: Run) -> Finding:
    """The finding of a check that cannot compare `case_run` with a run of `who`, with the calls that it ended in."""
    return rule.finding(who=who, why=why_unfinished(run), expected=f"a run of {who}", found=_ending(run, case_run))


def _ending(run: Run | None, case_run: Run) -> str | None:
    causes = () if run is None else run.causes or run.failures
    if not causes:
        return None
    first = causes[0]
    phase = f" in {first.phase}" if first.phase else ""
    calls = innermost_calls(first.traceback, _CALLS)
    lines = [f"  {'called from' if place else 'in'} {call}" for place, call in enumerate(calls)]
    software = case_run.traces[0].software if case_run.traces else {}
    versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "torchao") if name in software)
    ended = f"{format_ranks([first.rank])} {first.kind}{phase}" + (f", with {versions}" if versions else "")
    return "\n".join([ended, *lines])
