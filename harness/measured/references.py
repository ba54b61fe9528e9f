"""The references: running the BF16 cases that goldens are made from.

Owns which cases those are and that nothing is taken from a run that is not sound. The file format is `golden.py`'s,
running is `workflow.py`'s, storing is up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.checks.finite import NAME as FINITE
from harness.checks.finite import check_finite
from harness.checks.fp8_on import NAME as FP8_ON
from harness.checks.fp8_on import check_fp8_on
from harness.checks.judge import Judgement, judge
from harness.checks.witnesses import Witnesses
from harness.engine.wire import JobStatus
from harness.measured.golden import Golden, GoldenDamaged, GoldenMissing, load_golden, make_golden, tree_commit
from harness.project import Project
from harness.result import CaseResult
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.witness import WitnessBench
from harness.spec.case import Case
from harness.spec.caseid import family_id, parse_case_id, reference_case
from harness.spec.gemms import converted_fqns, scaled_mm_calls
from harness.spec.rules import expected_refusal
from harness.trace import Run
from harness.verdict import Verdict
from harness.workflow import run_cases


class GoldenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A golden made now and the one it replaces. `old_trouble` says why there is no old one though its file exists."""

    new: Golden
    old: Golden | None
    old_trouble: str = ""


class References(msgspec.Struct, frozen=True, kw_only=True):
    """What came of running references: the new goldens, and the results of the runs that gave none."""

    changes: tuple[GoldenChange, ...]
    failed: tuple[CaseResult, ...]
    interrupted: bool


class Soundness:
    """Judges a run on its own: complete, finite, FP8 exactly where asked. It is the `Judge` of `casework.py`."""

    def expectation(self, case: Case) -> None:
        """Nothing is expected of a reference but that it trains."""

    def judge(self, case: Case, run: Run, status: JobStatus, bench: WitnessBench) -> Judgement:
        """Passed when a reference or a noise sample may be taken from this run."""
        witnesses = Witnesses(
            golden=None,
            tolerance=None,
            refusal=None,
            expected_fqns=converted_fqns(case),
            expected_scaled_mm=scaled_mm_calls(case),
        )
        if status != "ok" or run.failures:
            return judge(case, run, status, witnesses)
        findings = (*check_finite(case, run, witnesses), *check_fp8_on(case, run, witnesses))
        verdict = Verdict.INVARIANT if findings else Verdict.PASSED
        return Judgement(verdict=verdict, findings=findings, checks=(FINITE, FP8_ON))


def needed_references(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The reference cases that these cases are compared with, one a family. Expected refusals need none."""
    trained = (case for case in cases if expected_refusal(case) is None)
    return tuple({family_id(case): reference_case(case) for case in trained}.values())


def make_goldens(
    project: Project, references: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> References:
    """Run the reference cases and return their goldens next to the stored ones. Stores nothing."""
    result = run_cases(project, references, plan, Soundness(), progress)
    commit = tree_commit(project.root)
    sound = [each for each in result.results if each.verdict is Verdict.PASSED]
    goldens = [_golden(each, reason=reason, command=command, commit=commit) for each in sound]
    return References(
        changes=tuple(_change(project, golden) for golden in goldens),
        failed=tuple(each for each in result.results if each.verdict is not Verdict.PASSED),
        interrupted=result.interrupted,
    )


def _golden(result: CaseResult, *, reason: str, command: str, commit: str) -> Golden:
    assert result.run is not None, "a case that passed has a run"
    family = family_id(parse_case_id(result.case_id))
    return make_golden(result.run, family=family, case_id=result.case_id, command=command, reason=reason, commit=commit)


def _change(project: Project, new: Golden) -> GoldenChange:
    try:
        return GoldenChange(new=new, old=load_golden(project.root, new.hardware, new.family))
    except GoldenMissing:
        return GoldenChange(new=new, old=None)
    except GoldenDamaged as error:
        return GoldenChange(new=new, old=None, old_trouble=error.text)
