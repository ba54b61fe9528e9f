"""The signatures: runs cases that no formula describes and records what they do.

Refuses what fails any other check: a fault must not become what later runs are compared with. Does not store
signatures: the caller does, with `evidence/signature.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.checks import signature as check
from harness.checks.judge import Judgement
from harness.engine.messages import JobStatus
from harness.errors import HarnessError
from harness.evidence.signature import (
    Signature,
    SignatureDamaged,
    SignatureMissing,
    load_signature,
    make_signature,
)
from harness.evidence.tree import source_commit
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.project import Project
from harness.result import CaseResult
from harness.running.case_judge import CaseJudge, prepare_judge
from harness.running.identity import check_targets
from harness.running.injection import Injection
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.witnesses import WitnessCache
from harness.trace import Run
from harness.verdict import Verdict
from harness.workflow import check_fits, run_cases


class SignatureChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new signature and the one that it replaces. `old_error` says why an existing file could not be read."""

    new: Signature
    old: Signature | None
    old_error: str = ""


class Signatures(msgspec.Struct, frozen=True, kw_only=True):
    """The new signatures in the order of the cases, and the results of the cases of which none was made."""

    changes: tuple[SignatureChange, ...]
    failed: tuple[CaseResult, ...]
    interrupted: bool


class RecordingJudge:
    """Judges runs by every other check and makes signatures of those that pass. The `Judge` of `case_runner.py`."""

    def __init__(self, judge: CaseJudge, *, command: str, reason: str, commit: str) -> None:
        self.expectation = judge.expectation
        self.fixes = judge.fixes  # of a case with a recorded fault its run with the fix is recorded
        self.made: dict[str, Signature] = {}
        self._judge = judge
        self._provenance = {"command": command, "reason": reason, "commit": commit}

    def judge(
        self, case: Case, run: Run, status: JobStatus, cache: WitnessCache, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """The verdict on a run; invariant for one that passes and of which no signature can be made."""
        judged = self._judge.judge(case, run, status, cache, fixes)
        if judged.verdict is not Verdict.PASSED:
            return judged
        name = case_id(case)
        try:
            self.made[name] = make_signature(run, case_id=name, **self._provenance)
        except HarnessError as error:
            finding = check.UNRECORDABLE.finding(problem=f"{error.what} Fix: {error.fix}")
            return msgspec.structs.replace(judged, verdict=finding.verdict, findings=(finding,))
        return judged


def record_signatures(
    project: Project, cases: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> Signatures:
    """Run the cases and return their signatures with the stored ones. Stores nothing."""
    check_fits(cases, plan)
    check_targets((case.target for case in cases), project.root)
    others = prepare_judge(project, cases, plan, signatures=False)
    judge = RecordingJudge(others, command=command, reason=reason, commit=source_commit(project.root))
    result = run_cases(project, cases, plan, judge, progress)
    return Signatures(
        changes=tuple(
            _change(project, judge.made[each.case_id]) for each in result.results if each.case_id in judge.made
        ),
        failed=tuple(each for each in result.results if each.case_id not in judge.made),
        interrupted=result.end.interrupted,
    )


def _change(project: Project, new: Signature) -> SignatureChange:
    try:
        return SignatureChange(new=new, old=load_signature(project.root, new.case_id))
    except SignatureMissing:
        return SignatureChange(new=new, old=None)
    except SignatureDamaged as error:
        return SignatureChange(new=new, old=None, old_error=error.text)
