"""Trials of a named case on one engine, each to its signature: recorded faults and their fixes play no part here."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.durable import WriteFailed, append_line
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plugins.bugs.bugfile import BugFile, holds_bugs, read_bug_file
from harness.project import Project
from harness.result import CaseResult
from harness.running.case_judge import judge_of_any_case
from harness.running.case_runner import CaseRunner
from harness.running.executor import open_executor
from harness.running.injection import Injection, parse_injection
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.schedule import run_schedule
from harness.running.selection import one_case
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
        ended = run_schedule(
            cases,
            self._runner.run,
            self._runner.stop,
            jobs=self._plan.jobs,
            started=lambda case: self._progress.started(case_id(case), case.world_size),
            finished=self._tell,
        )
        results = [result for result in ended.results if result is not None]
        if ended.interrupted or len(results) < len(cases):
            raise KeyboardInterrupt
        return tuple(results)

    def _tell(self, result: CaseResult) -> bool:
        self._progress.finished(result.case_id, f"{result.case_id}: {trial_result(result).text}", remarkable=False)
        return False


def trial_result(result: CaseResult) -> TrialResult:
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
    with open_executor(plan, project, progress.note) as executor:
        cache = open_witnesses(project, plan, executor)
        runner = CaseRunner(plan, executor, judge_of_any_case(project, plan), cache, progress.note)
        yield Trials(plan, runner, progress)


def run_once(
    project: Project, plan: Plan, progress: Progress, case: Case, injections: Sequence[Injection] = ()
) -> CaseResult:
    with open_trials(project, plan, progress, case, injections) as trials:
        (result,) = trials.run([case])
    return result


class Journal:
    """Results of trials by the id of their case, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, TrialResult] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(msgspec.DecodeError):  # a crash cut it in two
                result = msgspec.json.decode(line, type=TrialResult)
                self._known[result.case_id] = result

    def get(self, name: str) -> TrialResult | None:
        """The stored result of this case; None if there is none."""
        return self._known.get(name)

    def keep(self, result: TrialResult) -> None:
        self._known[result.case_id] = result
        with contextlib.suppress(WriteFailed):  # a full disk costs time, not correctness
            append_line(self._path, msgspec.json.encode(result))


class NamedCase(NamedTuple):
    case: Case
    bug: BugFile | None


def named_case(project: Project, text: str) -> NamedCase:
    """The case of an id, of a file with one case, or of the bug `text` in cases/bugs. Raises HarnessError if none."""
    path = Path(text)
    if not path.is_file():
        path = project.bugs / f"{text}.toml"
    if path.is_file() and holds_bugs(path.resolve()):
        bug_file = read_bug_file(path)
        return NamedCase(bug_file.runnable(), bug_file)
    return NamedCase(one_case(project, text), None)


def injections_for(named: NamedCase, given: tuple[str, ...], *, planted: bool) -> tuple[Injection, ...]:
    """The injections of --inject, and with `planted` the bug's planted faults. Raises HarnessError if it has none."""
    if not planted:
        return tuple(map(parse_injection, given))
    if named.bug is None or not named.bug.bug.planted:
        where = "--planted" if named.bug is None else named.bug.where
        raise HarnessError("no planted fault brings this bug back.", where=where, fix="give --inject fault:NAME.")
    return tuple(map(parse_injection, (*given, *(f"fault:{name}" for name in named.bug.bug.planted))))
