"""The references: runs the BF16 cases that goldens are made from.

Chooses these cases and rejects unsound runs. Does not store goldens: the caller does, with `evidence/golden.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.checks import alignment, finite, fp8_on, matmuls
from harness.checks.catalogue import CHECKS
from harness.checks.judge import Judgement, judge
from harness.checks.witnesses import Witnesses
from harness.engine.hardware import arithmetic_limits, cpu_extensions
from harness.engine.messages import JobStatus
from harness.evidence.golden import Golden, make_golden
from harness.evidence.tree import source_commit
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import family_id, parse_case_id, reference_case
from harness.matrix.rules import expected_refusal
from harness.project import Project
from harness.result import CaseResult
from harness.running.injection import Injection
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.witnesses import WitnessCache
from harness.trace import Run
from harness.verdict import Verdict
from harness.workflow import run_cases


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The new goldens, and the results of the references that failed."""

    goldens: tuple[Golden, ...]
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
        return judge(case, run, status, Witnesses(expect=Expectations(case)), checks=_SANITY)


def needed_references(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The reference cases of these cases, one per family. Cases with an expected refusal need none."""
    training = (case for case in cases if expected_refusal(case) is None)
    return tuple({family_id(case): reference_case(case) for case in training}.values())


def make_goldens(
    project: Project, references: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> References:
    """Run the reference cases and return their goldens. Stores nothing."""
    result = run_cases(project, references, plan, SanityJudge(), progress)
    commit = source_commit(project.root)
    passed = [each for each in result.results if each.verdict is Verdict.PASSED]
    goldens = [_golden(each, reason=reason, command=command, commit=commit) for each in passed]
    return References(
        goldens=tuple(goldens),
        failed=tuple(each for each in result.results if each.verdict is not Verdict.PASSED),
        interrupted=result.end.interrupted,
    )


def _golden(result: CaseResult, *, reason: str, command: str, commit: str) -> Golden:
    assert result.run is not None, "a case that passed has a run"
    family = family_id(parse_case_id(result.case_id))
    made = make_golden(result.run, family=family, case_id=result.case_id, command=command, reason=reason, commit=commit)
    on_cpu = {"cpu": cpu_extensions(), "limits": arithmetic_limits()} if made.provenance.device == "cpu" else {}
    return msgspec.structs.replace(made, provenance=msgspec.structs.replace(made.provenance, **on_cpu))
