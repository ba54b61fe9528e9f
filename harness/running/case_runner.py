"""The work on one case: a run on ranks, then one verdict.

Owns how a `CaseResult` is put together. Every front end runs cases through here, so that they cannot differ. What a
case is checked by comes from a `Judge` (`case_judge.py`); what is tried again is decided in the engine (`outcome.py`).
"""

import traceback
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from harness.checks.catalogue import BROKEN, UNEXPLAINED, signature_of
from harness.checks.failures import REPORT, advice
from harness.checks.judge import Judgement, run_from_outcome
from harness.engine.messages import JobOutcome, JobStatus
from harness.evidence.references import Reference, RunsByRole
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.result import Attempt, CaseResult, WithFix
from harness.running.executor import Executor
from harness.running.plan import Injection, Plan
from harness.running.references import ReferenceLost, ReferenceRunner
from harness.sources import PACKAGES, installed_versions, unreleased_of
from harness.trace import Run
from harness.verdict import Finding, Verdict

NONE: RunsByRole = MappingProxyType({})


class Judge(Protocol):
    """What cases are checked by. It starts no rank: `needs` names the references, the caller has them run."""

    def expectation(self, case: Case) -> str | None:
        """Return the name of the refusal or the known fault that the case must show, if any."""
        return None

    def fixes(self, case: Case) -> tuple[Injection, ...]:
        """Return the candidate fixes of the faults that are recorded for the case."""
        return ()

    def needs(
        self, case: Case, run: Run | None = None, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> tuple[Reference, ...]:
        """Return the references that the case is compared with.

        Before its run all that it will want, some without a request; then those that `run` and those that are there
        allow: asked again with them, until it names no other.
        """
        return ()

    def needs_if_failing(self, case: Case, run: Run, judgement: Judgement) -> tuple[Reference, ...]:
        """Return the references that explain a failure and that nothing else needs."""
        return ()

    def judge(
        self, case: Case, run: Run, status: JobStatus, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """Return the verdict on what came back from the ranks, which ran with `fixes`; `have`: the references.

        It is `concluded` afterwards.
        """

    def concluded(
        self, case: Case, run: Run, judgement: Judgement, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """Return the judgement with what explains it: by the references for a failure, and by what is recorded."""
        return judgement


class Judged(NamedTuple):
    """A run with the verdict on it, and what else it can be compared with."""

    case: Case
    run: Run
    judgement: Judgement
    references: ReferenceRunner
    fixes: Sequence[Injection]


Review = Callable[[Judged], Judgement]


def as_judged(judged: Judged) -> Judgement:
    """Return the judgement as it is."""
    return judged.judgement


class CaseRunner:
    """Runs cases to their results; thread-safe. `review` sees every judgement before the records are dropped."""

    def __init__(
        self, plan: Plan, executor: Executor, judge: Judge, references: ReferenceRunner, review: Review = as_judged
    ) -> None:
        self._plan = plan
        self._review = review
        self._references = references
        self._executor = executor
        self._judge = judge

    def run(self, case: Case, fixes: Sequence[Injection] = ()) -> CaseResult | None:
        """Return the result of a case; None when stopped. `fixes`: of recorded faults, if no run goes without."""
        outcome = self._executor.execute(case, fixes)
        result = None if outcome is None else self._result(case, outcome, fixes)
        if result is not None and not fixes and _hides_others(result) and self._judge.fixes(case):
            result = self._with_fix(case, result)
        # A run to compare with may have been stopped too, and the case is as good as before.
        return None if self._executor.stopped else result

    def not_run(self, case: Case) -> CaseResult:
        judgement = Judgement(verdict=Verdict.NOT_RUN, findings=())
        return self._assembled(case, judgement, run=None, attempts=())

    def _result(self, case: Case, outcome: JobOutcome, fixes: Sequence[Injection]) -> CaseResult:
        judgement, run = self._judged(case, outcome, fixes)
        attempts = (*map(_lost, outcome.earlier), _attempt(outcome, judgement.verdict))
        return self._assembled(case, judgement, run=run, attempts=attempts)

    def _judged(self, case: Case, outcome: JobOutcome, fixes: Sequence[Injection]) -> tuple[Judgement, Run | None]:
        run: Run | None = None
        try:
            run = run_from_outcome(outcome)
            judgement = self._compared(case, run, outcome.status, fixes)
            judgement = self._review(Judged(case, run, judgement, self._references, fixes))
            return _explained(judgement, run, outcome), run
        except ReferenceLost as lost:
            finding = _report(str(lost))
        except Exception as error:  # a fault of the harness in one case must not lose the results of the others
            finding = BROKEN.finding(error=repr(error), details="".join(traceback.format_exception(error)))
        return Judgement(verdict=Verdict.INFRA, findings=(finding,)), run

    def _compared(self, case: Case, run: Run, status: JobStatus, fixes: Sequence[Injection]) -> Judgement:
        """Return the judgement by all references that the case wants, explained by those for its failure."""
        have: dict[str, Run | None] = {}
        while wanted := [each for each in self._judge.needs(case, run, have, fixes) if each.role not in have]:
            have |= self._references.get_all(wanted)
        judgement = self._judge.judge(case, run, status, have, fixes)
        if more := self._judge.needs_if_failing(case, run, judgement):
            have |= self._references.get_all(more)
        return self._judge.concluded(case, run, judgement, have, fixes)

    def _with_fix(self, case: Case, known: CaseResult) -> CaseResult | None:
        """Return the result of a case with a recorded fault after a run with the fixes, which may hide no finding.

        What is wrong there comes first: nothing of the recorded fault is among it. None when stopped.
        """
        fixes = self._judge.fixes(case)
        outcome = self._executor.execute(case, fixes)
        if outcome is None:
            return None
        judgement, run = self._judged(case, outcome, fixes)
        *earlier, last = known.attempts
        seconds = {"wall_s": last.wall_s + outcome.wall_s, "cpu_s": last.cpu_s + outcome.cpu_s}
        names = tuple(fix.text for fix in fixes)
        with_fix = WithFix(fixes=names, verdict=judgement.verdict, findings=judgement.findings, checks=judgement.checks)
        verdict, wrong = (known.verdict, ()) if judgement.verdict.good else (judgement.verdict, judgement.findings)
        last = replace(last, verdict=verdict, message=last.message or outcome.message, **seconds)
        return replace(
            known,
            verdict=verdict,
            findings=(*(replace(one, within=f"with {' and '.join(names)}") for one in wrong), *known.findings),
            attempts=(*earlier, *map(_lost, outcome.earlier), last),
            with_fix=with_fix,
            failure_signature=signature_of(judgement.verdict, judgement.findings, run) or known.failure_signature,
        )

    def _assembled(
        self, case: Case, judgement: Judgement, *, run: Run | None, attempts: tuple[Attempt, ...]
    ) -> CaseResult:
        name = case_id(case)
        steps = min(run.traces, key=lambda trace: trace.rank).steps if run is not None and run.traces else ()
        return CaseResult(
            case_id=name,
            verdict=judgement.verdict,
            findings=judgement.findings,
            attempts=attempts,
            world_size=case.world_size,
            expectation=self._judge.expectation(case),
            losses=tuple(step.loss for step in steps),
            grad_norms=tuple(step.grad_norm for step in steps),
            failures=run.failures if run is not None else (),
            run=run.without_records if run is not None else None,
            checks=judgement.checks,
            not_judged=judgement.not_judged,
            golden=judgement.golden,
            golden_losses=judgement.golden_losses,
            derived=judgement.derived,
            command=self._plan.command(name),
            failure_signature=signature_of(judgement.verdict, judgement.findings, run),
            measured=judgement.measured,
            quarantined=self._plan.quarantined.get(name, ""),
            unreleased=unreleased_of(installed_versions(PACKAGES)),
            place=self._plan.place(case) if attempts else None,
        )


def _lost(outcome: JobOutcome) -> Attempt:
    return _attempt(outcome, Verdict.INFRA)


def _attempt(outcome: JobOutcome, verdict: Verdict) -> Attempt:
    return Attempt(
        verdict=verdict,
        message=outcome.message,
        wall_s=outcome.wall_s,
        cpu_s=outcome.cpu_s,
        detected_s=outcome.detected_s,
        nodes=outcome.nodes,
    )


def _hides_others(result: CaseResult) -> bool:
    """Return True for a case that fails as recorded, or so and in another way besides."""
    unexplained = any(finding.rule == UNEXPLAINED.name for finding in result.findings)
    return result.verdict is Verdict.KNOWN or unexplained


def _explained(judgement: Judgement, run: Run, outcome: JobOutcome) -> Judgement:
    """With the engine's own words when the job failed but no rank did: nothing else says why."""
    if outcome.status == "ok" or run.failures or not outcome.message:
        return judgement
    return replace(judgement, findings=(_report(outcome.message),))


def _report(text: str) -> Finding:
    advised = advice(text)
    return REPORT.finding(report=advised.what, fix=advised.fix)
