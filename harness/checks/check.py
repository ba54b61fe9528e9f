"""A check: the rules that it knows, its findings, what it asks and reads, when it applies, and its evidence.

Each check and its rules are declared in the file of its function, which the rules decorate. The judge, the
order of causes, what is not checked, the probes of a case and the reference of the checks are collected from there
(`catalogue.py`). Findings of many places and ranks are made into few: one for a rule that is broken, or for ranks that
find the same.
"""

import enum
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from harness.evidence.golden import Golden
from harness.evidence.profile import Profile
from harness.evidence.tolerance import Tolerance
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.text import format_ranks
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value, Verdict, check_of


class Stage(enum.Enum):
    """How near to the cause findings are, the nearest first. The value says why, for those of the next stage."""

    RUN = "incomplete records explain nothing"
    DATA = "other tokens or weights change every number"
    MODEL = "another model or parallel plan casts, sends and saves other tensors"
    SCALES = "a scale determines its float8 values, and a missing amax reduction shows in the scale too"
    VALUES = "a wrong scale makes values saturate or differ, otherwise the cast or the matmul is wrong"
    COLLECTIVES = "ranks compute with what they receive"
    EXECUTION = "fusion, recomputation and compilation change results"
    # From here on: what is wrong because something else is, or the only sign of a fault that no rule above describes.
    MODULE = "the inputs match, the output does not"
    OPERAND = "the first operand that differs names the module behind it"
    NONFINITE = "after NaN or Inf in a loss, gradients are NaN or Inf too"
    MEMORY = "a tensor that is kept too long may be reused"
    STEP = "a rank contradicts itself"
    SAME_LAYOUT = "compared with the same layout, so few causes remain"
    ONE_RANK = "compared with one rank in FP8, so the layout may be the cause too"
    BF16 = "compared with BF16, so anything may be the cause"

    @property
    def place(self) -> int:
        """Return the position of a rule in a report; 0 is nearest to the cause."""
        return list(Stage).index(self)

    @property
    def is_cause(self) -> bool:
        """Return True for a cause, False for what may follow from one."""
        return self.place < Stage.MODULE.place


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which something can be wrong. `name`: its check and what is wrong, "scales/amax".

    `says`: the template of the sentence. `numeric`: a number is off. `judged`: False where the check lacks something.
    `key`: the values that tell one failure of the rule from another. `located`: the module of a finding is where the
    fault is, not the worst of many. `only`: what alone breaks it, where no fault that is injected does.
    """

    name: str
    says: str
    stage: Stage
    numeric: bool = False
    judged: bool = True
    key: tuple[str, ...] = ()
    located: bool = False
    fix: str | None = None
    formula: str = ""
    only: str = ""

    @property
    def check(self) -> str:
        return check_of(self.name)

    def finding(  # noqa: PLR0913  what a finding has, beside the values of its sentence
        self,
        *,
        step: int | None = None,
        rank: int | None = None,
        ranks: Iterable[int] = (),
        module: str | None = None,
        operand: str = "",
        expected: str | None = None,
        found: str | None = None,
        size: float | None = None,
        fix: str | None = None,
        notes: Iterable[str] = (),
        details: str = "",
        suffix: str = "",
        values: Mapping[str, Value] = {},
        **more: Value,
    ) -> Finding:
        """A finding by this rule. `rank`: the first of `ranks` where it is not given. `suffix`: ends the sentence.

        `values` and `more` fill the sentence.
        """
        shown = tuple(sorted(set(ranks)))
        return Finding(
            rule=self.name,
            says=self.says + suffix,
            values={name: +value if isinstance(value, float) else value for name, value in {**values, **more}.items()},
            judged=self.judged,
            verdict=Verdict.NUMERIC if self.numeric else Verdict.INVARIANT,
            step=step,
            rank=shown[0] if rank is None and shown else rank,
            ranks=shown,
            module=module,
            operand=operand,
            expected=expected,
            found=found,
            size=size,
            fix=fix or self.fix,
            notes=tuple(notes),
            details=details,
            formula=self.formula,
        )


class Rules:
    """Declares one check and its rules, each of them by a call. `stage` and `located` are those of most of them.

    `only`: what alone breaks some of them, with their names.
    """

    def __init__(self, check: str, stage: Stage, *, located: bool = False, only: Mapping[str, str] = {}) -> None:
        self.check = check
        self.declared: tuple[Rule, ...] = ()
        self._stage, self._located = stage, located
        self.only = {name: why for why, names in only.items() for name in names.split()}

    def __call__(
        self, name: str, says: str, *, stage: Stage | None = None, located: bool | None = None, **fields: Any
    ) -> Rule:
        """Return the declared rule: its name in the check and its sentence. `fields`: the other ones of `Rule`."""
        rule = Rule(
            name=f"{self.check}/{name}",
            says=says,
            stage=stage or self._stage,
            located=self._located if located is None else located,
            **{"only": self.only.get(name, ""), **fields},
        )
        self.declared += (rule,)
        return rule

    def judged_by(self, **fields: Any) -> "Callable[[CheckFunction], Check]":
        """Return the decorator of the function of the check. `fields`: those of `Check`."""
        return partial(Check, declares=self, **fields)

    def no_reference(self) -> Rule:
        """Return the rule of a check that lacks a run to compare with."""
        says, only = "{who} could not be run{why}", "a missing reference"
        return self("no-reference", says, stage=Stage.RUN, judged=False, located=False, only=only)


def by_name(rules: Iterable[Rule]) -> Mapping[str, Rule]:
    named: dict[str, Rule] = {}
    for rule in rules:
        assert rule.name not in named, f"two rules are named {rule.name}"
        named[rule.name] = rule
    return named


T = TypeVar("T", bound=Hashable)


class Mismatch(NamedTuple):
    """One value of one rank that is not what it must be. Mismatches sort by step and order of execution."""

    step: int
    order: int  # of execution on its rank
    rank: int
    module: str
    rule: Rule  # that is broken
    expected: str
    found: str
    operand: str = ""  # of the module, "weight in forward"
    values: tuple[tuple[str, Value], ...] = ()  # of the sentence of the rule

    @property
    def place(self) -> tuple[int, int, int, str]:
        """Return the sort key."""
        return self[:4]

    @property
    def place_words(self) -> str:
        """Return the end of a sentence that says where a rule is broken first."""
        where = "for {operand} of" if self.operand else "in"
        return f": first {where} {{module}} at step {{step}} on rank {{rank}}"

    def finding(self, suffix: str = "", notes: Iterable[str] = (), **values: Value) -> Finding:
        """Return the finding that points at this mismatch; `suffix` ends the sentence of the rule."""
        return self.rule.finding(
            step=self.step,
            rank=self.rank,
            module=self.module,
            operand=self.operand,
            expected=self.expected,
            found=self.found,
            suffix=suffix,
            notes=notes,
            values={**dict(self.values), **values},
        )


def findings_by_rule(
    mismatches: Iterable[Mismatch], explain: Callable[[Mismatch], str] = lambda first: ""
) -> list[Finding]:
    """Return one finding per rule that is broken: the first place, how many mismatches there are, and where ranks.

    `explain` may say of the first one how it came about.
    """
    by_rule: dict[tuple[object, ...], list[Mismatch]] = {}
    for mismatch in sorted(mismatches, key=lambda mismatch: mismatch[:3]):
        by_rule.setdefault((mismatch.rule.name, mismatch.values), []).append(mismatch)
    findings = []
    for first, *others in by_rule.values():
        suffix, notes = f"{first.place_words}; {{total}} in total on {{ranks}}", filter(None, [explain(first)])
        ranks = sorted({first.rank, *(other.rank for other in others)})
        findings.append(replace(first.finding(suffix, notes, total=1 + len(others)), ranks=tuple(ranks)))
    return findings


def group_ranks(run: Run, value_of: Callable[[RankTrace], T]) -> dict[T, list[int]]:
    groups: dict[T, list[int]] = {}
    for trace in run.by_rank:
        groups.setdefault(value_of(trace), []).append(trace.rank)
    return groups


def merge_ranks(run: Run, findings_of: Callable[[RankTrace], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of every rank. Ranks with the same findings share them: sentences end in "on ranks 0-3"."""
    return [
        replace(finding, says=f"{finding.says} on {{ranks}}", rank=ranks[0], ranks=tuple(ranks))
        for findings, ranks in group_ranks(run, lambda trace: tuple(findings_of(trace))).items()
        for finding in findings
    ]


def about_ranks(finding: Finding, ranks: Iterable[int], run: Run | None = None) -> Finding:
    """Return a finding that names these ranks, or none where every rank of `run` has the same number."""
    shown = tuple(sorted(set(ranks)))
    everywhere = run is not None and len(shown) == len(run.traces)
    if everywhere and len(shown) > 1:
        return replace(finding, says=f"{finding.says}, on all ranks")
    if everywhere or not shown:
        return finding
    return replace(finding, says=f"{finding.says}, on {{ranks}}", rank=shown[0], ranks=shown)


def first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding by every rule with its values: of what is wrong in several steps, the first step."""
    first: dict[tuple[str, frozenset[tuple[str, Value]]], Finding] = {}
    for finding in findings:
        first.setdefault((finding.rule, frozenset(finding.values.items())), finding)
    return list(first.values())


# What a check is given, and what it is


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """What one case is checked by besides its run. None: not available, which is a finding of the check that needs it.

    `running/` collects it. A run that did not finish is kept with its failures, so that this finding says why.
    """

    expect: Expectations
    records: tuple[str, ...] = ()  # the fields of `RankTrace` that the ranks were asked to fill
    golden: Golden | None = None
    profile: Profile | None = None
    update_profile: str = ""  # the command that records one
    tolerance: Tolerance | None = None
    parity_tolerance: Tolerance | None = None
    reference: Run | None = None  # the BF16 reference that was run for want of a golden
    underived: Run | None = None  # the first BF16 run for a derived tolerance that did not finish
    solo: Run | None = None  # the run of the single-rank reference with the same recipe
    replay: Run | None = None  # this very run again, module by module on one rank
    partner: Run | None = None  # the run of `expect.relation.partner`
    partner_has_fix: bool = False  # counterpart and profile are of a run with the candidate fix, as the second run is


CheckFunction = Callable[[Case, Run, Witnesses], Iterable[Finding]]
Reason = Callable[[Expectations, str], str]  # of a case on a device (`RankTrace.device`); empty: there is none


def always(expect: Expectations, device: str) -> str:
    """No reason: for a check that applies to every case, and checks all of it."""
    return ""


class Check(msgspec.Struct, frozen=True):
    """Made of a function by `@RULES.judged_by(blind=…)`, whose docstring begins with the question.

    The function is pure: a case, its run and its references in, findings out. It is called where every rank has the
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
    needs_profile: bool = False  # it compares with what was recorded, where that was done with these versions
    needs_relation: bool = False  # it compares with a counterpart, which not every case has
    checks_counterpart: bool = False  # it checks the counterpart of a compiled case, whose modules cannot be recorded

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
        """Return the rule that is broken where a rank lacks what it was asked to record."""
        says = "no record of {record} on {where}"
        return Rule(name=f"{self.name}/no-record", stage=Stage.RUN, says=says, judged=False, only="a damaged trace")

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
        """Return the fields of `RankTrace` that ranks must have filled; none where it checks the counterpart."""
        if self.checks_counterpart and expect.stands_for_modules:
            return ()
        return self.compiled_records or self.records if expect.case.compile != "none" else self.records

    def asks(self, expect: Expectations) -> tuple[str, ...]:
        """Return the fields of `RankTrace` that ranks must be asked to fill for it."""
        return (*self.records_of(expect), *self.also_reads)

    def reads(self, expect: Expectations) -> tuple[str, ...]:
        """Return every field of `RankTrace` that it reads, of a run or of its counterpart."""
        return (*(self.records_of(expect) or self.records), *self.also_reads, *filter(None, [self.unasked]))

    def says_nothing_of(self, expect: Expectations, device: str) -> str:
        """Return why it cannot judge a case on a device although its records exist; empty if it can."""
        reason = self.not_judged(expect, device)
        if not reason and self.needs_linears and expect.model is None:
            return "the single-rank reference, which shows the linears, did not run"
        return reason


def noun(record: str) -> str:
    """Return a field of `RankTrace` in words."""
    return record.replace("_", " ")


def finished(run: Run | None) -> Run | None:
    """Return the run; None if it did not finish."""
    return run if run is not None and run.complete else None
