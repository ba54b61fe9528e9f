"""The work on one case: a recorded fault with a candidate fix is run twice, and the second run hides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest
from msgspec.structs import replace

from harness.checks.catalogue import UNEXPLAINED
from harness.checks.judge import Judgement
from harness.engine.messages import JobOutcome, JobStatus, RankOutcome
from harness.evidence.references import Reference, RunsByRole, operands_reference, solo_reference
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.running.case_runner import NONE, CaseRunner, Judge
from harness.running.executor import Executor
from harness.running.plan import Injection, Plan
from harness.running.references import ReferenceLost, ReferenceRunner
from harness.trace import Run
from harness.verdict import Verdict
from tests.builders import a_finding, make_case, make_trace

CASE = make_case(steps=2)
FIX = Injection(text="cases/fixes/x.py:apply", target="/x.py:apply")
ROWS = a_finding(check="graphs", message="wrong rows", verdict=Verdict.NUMERIC)
SCALE = a_finding(check="scales", message="wrong scale")
Before = Callable[[RunsByRole, Sequence[Injection]], object]


class FakeExecutor:
    """Ranks that finish; remembers with which fixes they ran."""

    stopped = False

    def __init__(self) -> None:
        self.fixes: list[tuple[Injection, ...]] = []

    def execute(self, case: Case, fixes: Sequence[Injection] = ()) -> JobOutcome:
        self.fixes.append(tuple(fixes))
        payload = msgspec.msgpack.encode(make_trace(CASE))
        rank = RankOutcome(rank=0, status="returned", payload=payload)
        return JobOutcome(job_id="j", status="ok", ranks=(rank,), wall_s=2.0, cpu_s=3.0)


class FakeJudge(Judge):
    """Says one thing of the run as it is, and another of the run with the fix; calls `before` each time."""

    def __init__(
        self,
        plain: Judgement,
        fixed: Judgement,
        fixes: tuple[Injection, ...] = (FIX,),
        before: Before = lambda *_: None,
    ) -> None:
        self._said = (plain, fixed)
        self._fixes = fixes
        self._before = before

    def expectation(self, case: Case) -> str | None:
        return "recorded"

    def fixes(self, case: Case) -> tuple[Injection, ...]:
        return self._fixes

    def judge(
        self, case: Case, run: Run, status: JobStatus, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        self._before(have, fixes)
        return self._said[bool(fixes)]


KNOWN = Judgement(verdict=Verdict.KNOWN, findings=(ROWS,))
PASSED = Judgement(verdict=Verdict.PASSED, findings=(), checks=("scales",))


def runner(judge: FakeJudge, executor: FakeExecutor, references: object = None) -> CaseRunner:
    plan = Plan()
    return CaseRunner(plan, cast("Executor", executor), judge, cast("ReferenceRunner", references))


def test_a_recorded_fault_runs_again_with_its_fix_or_once_where_it_needs_it() -> None:
    executor = FakeExecutor()
    result = runner(FakeJudge(KNOWN, PASSED), executor).run(CASE)
    assert result is not None and result.with_fix is not None
    assert (result.case_id, result.verdict, result.findings) == (case_id(CASE), Verdict.KNOWN, (ROWS,))
    assert (result.with_fix.fixes, result.with_fix.checks) == ((FIX.text,), ("scales",))
    assert executor.fixes == [(), (FIX,)]
    assert (result.seconds, result.cpu_s) == (4.0, 6.0)
    executor = FakeExecutor()
    result = runner(FakeJudge(KNOWN, PASSED), executor).run(CASE, (FIX,))
    assert result is not None and (result.verdict, result.with_fix) == (Verdict.PASSED, None)
    assert executor.fixes == [(FIX,)]


def test_what_is_wrong_with_the_fix_decides_and_comes_first() -> None:
    broken = Judgement(verdict=Verdict.INVARIANT, findings=(SCALE,))
    result = runner(FakeJudge(KNOWN, broken), FakeExecutor()).run(CASE)
    assert result is not None
    assert result.verdict is Verdict.INVARIANT
    assert result.findings[0] == replace(SCALE, within="with cases/fixes/x.py:apply")
    assert result.findings[1] == ROWS
    left = Judgement(verdict=Verdict.KNOWN, findings=(SCALE,))
    result = runner(FakeJudge(KNOWN, left), FakeExecutor()).run(CASE)
    assert result is not None and result.with_fix is not None
    assert (result.verdict, result.with_fix.findings) == (Verdict.KNOWN, (SCALE,))


@pytest.mark.parametrize("with_fix", [Judgement(verdict=Verdict.NUMERIC, findings=(SCALE,)), PASSED])
def test_a_fault_beside_a_recorded_one_is_seen_without_it(with_fix: Judgement) -> None:
    """What is wrong with the fix leads; where nothing is, the recorded fault has a larger effect than recorded."""
    other = UNEXPLAINED.finding(count=1, faults="recorded", rules=ROWS.rule)
    executor = FakeExecutor()
    plain = Judgement(verdict=Verdict.INVARIANT, findings=(ROWS, other))
    result = runner(FakeJudge(plain, with_fix), executor).run(CASE)
    assert result is not None and executor.fixes == [(), (FIX,)]
    leads = () if with_fix is PASSED else (replace(SCALE, within="with cases/fixes/x.py:apply"),)
    assert result.findings == (*leads, ROWS, other)
    assert result.verdict is (Verdict.INVARIANT if with_fix is PASSED else Verdict.NUMERIC)


UNDERIVED = msgspec.structs.replace(a_finding(check="loss_vs_golden", message="no tolerance"), judged=False)


@pytest.mark.parametrize(
    "plain",
    [Judgement(verdict=Verdict.INVARIANT, findings=(UNDERIVED,)), PASSED, KNOWN],
    ids=lambda judgement: judgement.verdict,
)
def test_a_case_whose_references_were_interrupted_was_not_run(plain: Judgement) -> None:
    executor = FakeExecutor()

    def interrupt(have: RunsByRole, fixes: Sequence[Injection]) -> None:
        """SIGTERM comes while witnesses run: what they would have told is missing in the verdict."""
        executor.stopped = bool(fixes) or plain is not KNOWN

    assert runner(FakeJudge(plain, PASSED, before=interrupt), executor).run(CASE) is None


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.NUMERIC, Verdict.UNEXPECTED_PASS, Verdict.HANG])
def test_only_what_is_known_runs_again(verdict: Verdict) -> None:
    executor = FakeExecutor()
    result = runner(FakeJudge(Judgement(verdict=verdict, findings=()), PASSED), executor).run(CASE)
    assert result is not None and result.with_fix is None
    assert executor.fixes == [()]
    executor = FakeExecutor()
    assert runner(FakeJudge(KNOWN, PASSED, fixes=()), executor).run(CASE) is not None
    assert executor.fixes == [()]


LOST = JobOutcome(job_id="j", status="infra", ranks=(), message="node b is gone.", wall_s=1.0, cpu_s=1.0)


def test_every_attempt_of_both_runs_is_told() -> None:
    class Retried(FakeExecutor):
        def execute(self, case: Case, fixes: Sequence[Injection] = ()) -> JobOutcome:
            return replace(super().execute(case, fixes), earlier=(LOST,))

    result = runner(FakeJudge(KNOWN, PASSED), Retried()).run(CASE)
    assert result is not None and result.with_fix is not None
    assert [attempt.verdict for attempt in result.attempts] == [Verdict.INFRA, Verdict.INFRA, Verdict.KNOWN]
    assert [attempt.message for attempt in result.attempts] == ["node b is gone.", "node b is gone.", ""]
    assert (result.seconds, result.cpu_s) == (6.0, 8.0)


def test_a_reference_that_the_machine_ended_makes_a_case_infra_with_the_reason() -> None:
    def lose(*_: object) -> None:
        raise ReferenceLost("solo x: killed by SIGBUS, not by the harness")

    executor = FakeExecutor()
    result = runner(FakeJudge(KNOWN, PASSED, before=lose), executor).run(CASE)
    assert result is not None and result.verdict is Verdict.INFRA and executor.fixes == [()]
    (finding,) = result.findings
    assert finding.message == "solo x: killed by SIGBUS, not by the harness" and "/dev/shm" in str(finding.fix)


class References:
    """Hands out runs by role; remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def get_all(self, references: Sequence[Reference]) -> RunsByRole:
        self.asked.append([reference.role for reference in references])
        return {reference.role: Run(traces=(), failures=()) for reference in references}


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.NUMERIC])
def test_a_failure_is_judged_once_and_concluded_with_what_explains_it(verdict: Verdict) -> None:
    seen: list[set[str]] = []

    class Explaining(FakeJudge):
        def needs(
            self, case: Case, run: Run | None = None, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
        ) -> tuple[Reference, ...]:
            return (solo_reference(case),)

        def needs_if_failing(self, case: Case, run: Run, judgement: Judgement) -> tuple[Reference, ...]:
            return () if judgement.verdict.good else (operands_reference(case),)

        def concluded(
            self, case: Case, run: Run, judgement: Judgement, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
        ) -> Judgement:
            seen.append({*have})
            return judgement

    references, said = References(), Judgement(verdict=verdict, findings=())
    explaining = Explaining(said, PASSED, before=lambda have, _: seen.append({"judged", *have}))
    result = runner(explaining, FakeExecutor(), references).run(CASE)
    assert result is not None and result.verdict is verdict
    more = [] if verdict.good else [["operands"]]
    assert references.asked == [["solo"], *more]
    assert seen == [{"judged", "solo"}, {"solo"} if verdict.good else {"solo", "operands"}]
