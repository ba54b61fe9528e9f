"""Trials: single cases run one after the other on one engine, each to its signature.

Recorded faults explain nothing here, and nothing is run a second time with a fix: the failure itself is what is looked
for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.project import Project
from harness.result import CaseResult
from harness.running.case_judge import judge_of_any_case
from harness.running.case_runner import CaseRunner
from harness.running.executor import open_executor
from harness.running.injection import Injection
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.schedule import run_schedule
from harness.running.witnesses import open_witnesses
from harness.verdict import FailureSignature, Verdict
from harness.workflow import check_fits


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a case showed. `signature` is None where nothing failed; `message` is the first finding."""

    case_id: str
    verdict: Verdict
    signature: FailureSignature | None
    message: str
    cpu_s: float

    @property
    def decided(self) -> bool:
        """False where the machine or the harness failed: it says nothing about the case."""
        return self.verdict not in (Verdict.INFRA, Verdict.NOT_RUN)

    @property
    def text(self) -> str:
        """The result in one line."""
        if not self.decided:
            return f"cannot tell: {self.message}"
        return "no failure" if self.signature is None else self.signature.text


class Trials:
    """Runs cases until closed. `run` is called from one thread."""

    def __init__(self, plan: Plan, runner: CaseRunner, progress: Progress) -> None:
        self._plan = plan
        self._runner = runner
        self._progress = progress
        self._submitted = 0

    def run(self, cases: Sequence[Case]) -> tuple[CaseResult, ...]:
        """The result of every case, in order. HarnessError for more ranks than slots, KeyboardInterrupt by Ctrl-C."""
        check_fits(cases, self._plan)
        self._submitted += len(cases)
        self._progress.begin(self._submitted)
        ended = run_schedule(cases, self._runner, _Observer(self._progress), jobs=self._plan.jobs)
        results = [result for result in ended.results if result is not None]
        if ended.interrupted or len(results) < len(cases):
            raise KeyboardInterrupt
        return tuple(results)


def trial_result(result: CaseResult) -> TrialResult:
    """The part of a result that says what failed."""
    return TrialResult(
        case_id=result.case_id,
        verdict=result.verdict,
        signature=result.failure_signature,
        message=result.findings[0].first_line if result.findings else "",
        cpu_s=result.cpu_s,
    )


@contextlib.contextmanager
def open_trials(
    project: Project, plan: Plan, progress: Progress, first: Case, injections: Sequence[Injection] = ()
) -> Iterator[Trials]:
    """Trials with these injections, whose ranks are warmed up for cases like the first."""
    plan = msgspec.structs.replace(plan.serving([first]), injections=tuple(injections))
    with open_executor(plan, project) as executor:
        cache = open_witnesses(project, plan, executor, progress.note)
        runner = CaseRunner(plan, executor, judge_of_any_case(project, plan), cache, progress.note)
        yield Trials(plan, runner, progress)


def run_once(
    project: Project, plan: Plan, progress: Progress, case: Case, injections: Sequence[Injection] = ()
) -> CaseResult:
    """The result of one case with these injections."""
    with open_trials(project, plan, progress, case, injections) as trials:
        (result,) = trials.run([case])
    return result


class _Observer:
    """Tells a `Progress` which cases run and what they show. It is the `Observer` of the schedule."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def started(self, case: Case) -> None:
        self._progress.started(case_id(case), case.world_size)

    def finished(self, result: CaseResult) -> None:
        self._progress.finished(result.case_id, f"{result.case_id}: {trial_result(result).text}", remarkable=False)
