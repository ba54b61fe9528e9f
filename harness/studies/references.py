"""The references: runs the BF16 cases that goldens are made from.

Chooses these cases and rejects unsound runs. Does not store goldens: the caller does, with `evidence/golden.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from harness.checks import alignment, finite, fp8_on, matmuls
from harness.checks.judge import CHECKS, Judgement, judge
from harness.checks.witnesses import Witnesses
from harness.engine.messages import JobStatus
from harness.evidence.golden import (
    Golden,
    GoldenDamaged,
    GoldenMissing,
    compare_goldens,
    load_golden,
    make_golden,
    tree_commit,
)
from harness.evidence.tolerance import ToleranceMissing, ToleranceUnfounded, tolerance_for
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import family_id, parse_case_id, reference_case
from harness.matrix.rules import expected_refusal
from harness.project import Project
from harness.result import CaseResult
from harness.running.injection import Injection
from harness.running.machine import arithmetic_limits, cpu_extensions
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.witnesses import WitnessCache
from harness.trace import Run
from harness.verdict import Verdict
from harness.workflow import run_cases


class GoldenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new golden and the one that it replaces. `old_error` says why an existing file could not be read."""

    new: Golden
    old: Golden | None
    old_error: str = ""


class LargestChange(msgspec.Struct, frozen=True, kw_only=True):
    """The step of a golden whose loss changed most for what is allowed there, in nats."""

    step: int
    change: float
    allowed: float

    @property
    def explains(self) -> bool:
        """True when no loss changed more than noise does."""
        return self.change <= self.allowed


def largest_change(change: GoldenChange, root: Path) -> LargestChange | None:
    """How the change compares with the tolerance of the reference; None where nothing was measured or is comparable."""
    if change.old is None or change.old.data_digest != change.new.data_digest:
        return None
    try:
        allowed = tolerance_for(parse_case_id(change.new.case_id), root).per_step
    except (ToleranceMissing, ToleranceUnfounded):
        return None
    rows = [row for row in compare_goldens(change.old, change.new) if row.loss_change is not None]
    found = [
        LargestChange(step=row.step, change=abs(row.loss_change or 0.0), allowed=limit)
        for row, limit in zip(rows, allowed, strict=False)
    ]
    return max(found, key=lambda each: each.change / each.allowed, default=None)


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The new goldens, and the results of the references that failed."""

    changes: tuple[GoldenChange, ...]
    failed: tuple[CaseResult, ...]
    interrupted: bool


_SANITY = tuple(check for check in CHECKS if check.name in (finite.NAME, fp8_on.NAME, matmuls.NAME, alignment.NAME))


class SanityJudge:
    """Judges a run by itself: complete, finite, FP8 exactly where requested. Implements `Judge` of `case_runner.py`."""

    def expectation(self, case: Case) -> None:
        """References must train, so nothing else is expected."""

    def fixes(self, case: Case) -> tuple[Injection, ...]:
        """None: a reference is what the installed packages compute."""
        return ()

    def judge(
        self, case: Case, run: Run, status: JobStatus, cache: WitnessCache, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """Passes runs that may become a golden or a noise sample."""
        return judge(case, run, status, Witnesses(expect=Expectations(case)), among=_SANITY)


def needed_references(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The reference cases of these cases, one per family. Cases with an expected refusal need none."""
    training = (case for case in cases if expected_refusal(case) is None)
    return tuple({family_id(case): reference_case(case) for case in training}.values())


def make_goldens(
    project: Project, references: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> References:
    """Run the reference cases and return their goldens with the stored ones. Stores nothing."""
    result = run_cases(project, references, plan, SanityJudge(), progress)
    commit = tree_commit(project.root)
    passed = [each for each in result.results if each.verdict is Verdict.PASSED]
    goldens = [_golden(each, reason=reason, command=command, commit=commit) for each in passed]
    return References(
        changes=tuple(_change(project, golden) for golden in goldens),
        failed=tuple(each for each in result.results if each.verdict is not Verdict.PASSED),
        interrupted=result.interrupted,
    )


def _golden(result: CaseResult, *, reason: str, command: str, commit: str) -> Golden:
    assert result.run is not None, "a case that passed has a run"
    family = family_id(parse_case_id(result.case_id))
    made = make_golden(result.run, family=family, case_id=result.case_id, command=command, reason=reason, commit=commit)
    on_cpu = {"cpu": cpu_extensions(), "limits": arithmetic_limits()} if made.provenance.device == "cpu" else {}
    return msgspec.structs.replace(made, provenance=msgspec.structs.replace(made.provenance, **on_cpu))


def _change(project: Project, new: Golden) -> GoldenChange:
    try:
        return GoldenChange(new=new, old=load_golden(project.root, new.hardware, new.family))
    except GoldenMissing:
        return GoldenChange(new=new, old=None)
    except GoldenDamaged as error:
        return GoldenChange(new=new, old=None, old_error=error.text)
