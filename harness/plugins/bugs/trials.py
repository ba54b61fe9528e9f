"""Trials of a named case, each to its signature, and whether it shows the bug that was reported.

In trials recorded faults and their fixes play no part. A bug is told by the signature of its failure, never by its
numbers. Where the bug file has a signature, the failure must have the same. Where it has none, as after an import, the
failure must be of the reported kind: a crash with the words of the reported error, a hang, NaN, wrong numbers.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from harness.checks.catalogue import normalized
from harness.durable import WriteFailed, append_line
from harness.errors import HarnessError
from harness.hints import LIST_BUGS
from harness.matrix.axes import axis_values, suggestion
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.records import KnownFault
from harness.plugins.bugs.bugfile import Bug, BugFile, holds_bugs, read_bug_file
from harness.project import Project
from harness.result import CaseResult
from harness.running.case_judge import prepare_judge
from harness.running.case_runner import CaseRunner
from harness.running.executor import Executor, open_executor
from harness.running.plan import Injection, Plan, parse_injection
from harness.running.progress import Progress
from harness.running.references import open_references
from harness.running.schedule import run_schedule
from harness.running.selection import is_case_id, one_case
from harness.text import counted
from harness.verdict import ExitCode, FailureSignature, Finding, Verdict
from harness.workflow import check_fits

PLANTED = "planted"  # what --inject calls the injected faults of a bug file


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a case showed. `profile` is None where nothing failed; `message` is the first finding."""

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

    def __init__(self, project: Project, plan: Plan, executor: Executor, progress: Progress) -> None:
        self._project = project
        self._plan = plan
        self._executor = executor
        self._references = open_references(project, plan, executor)
        self._progress = progress
        self._submitted = 0

    def run(self, cases: Sequence[Case]) -> tuple[CaseResult, ...]:
        """The result of every case, in order. HarnessError for more ranks than slots, KeyboardInterrupt by Ctrl-C."""
        check_fits(cases, self._plan)
        self._submitted += len(cases)
        self._progress.begin(self._submitted)
        judge = prepare_judge(self._project, cases, self._plan, excuses=False)
        ended = run_schedule(
            cases,
            CaseRunner(self._plan, self._executor, judge, self._references).run,
            self._executor.stop,
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
        yield Trials(project, plan, executor, progress)


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
        """Return the stored result of this case; None if there is none."""
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
    if not (path.is_file() or text in project.tiers or "/" in text or is_case_id(project, text)):
        fix = suggestion(text, [bug.stem for bug in project.bugs.glob("*.toml")], listed=LIST_BUGS)
        raise HarnessError("no bug file, no case id and no FILE.toml.", where=text, fix=fix)
    return NamedCase(one_case(project, text), None)


def injections_for(named: NamedCase, given: tuple[str, ...]) -> tuple[Injection, ...]:
    """The injections of --inject; "planted" stands for the injected faults of the bug: HarnessError if it has none."""
    planted = named.bug.bug.planted if named.bug is not None and PLANTED in given else ()
    if PLANTED in given and not planted:
        where = f"--inject {PLANTED}" if named.bug is None else named.bug.where
        raise HarnessError("no injected fault brings this bug back.", where=where, fix="give --inject fault:NAME.")
    own = tuple(text for text in given if text != PLANTED)
    return tuple(map(parse_injection, (*own, *(f"fault:{name}" for name in planted))))


Answer = Literal["reproduced", "another failure", "not reproduced", "cannot tell"]

CANNOT_TELL = 125  # for `git bisect run`: skip this commit
_SHARE = 0.5  # of the words of a reported error that must be in the one that is found
_MEMORY = ("memory", "live_memory", "leaks")
# The checks by which each kind of symptom shows itself; None: any check.
_SHOWN_BY: dict[str, tuple[str, ...] | None] = {
    "nan": ("finite",),
    "wrong_numbers": None,
    "diverges": None,
    "unknown": None,
    "memory": _MEMORY,
    "traffic": ("traffic", "profile"),
    "slow": ("traffic", "matmuls", "recompute", "graphs", "fp8_on", *_MEMORY),
    "metric": ("parity", "loss_vs_golden", "finite"),
    "not_converted": ("fp8_on", "matmuls", "model", "graphs", "scales"),
}
_WORD = re.compile(r"[A-Za-z_]{3,}")


class Reproduced(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with what was expected and found side by side, and what differs from the report.

    `known`: the recorded upstream faults that show, by name, each with its reason and how much it explains.
    """

    answer: Answer
    expected: str
    found: TrialResult
    known: Mapping[str, str]
    differs: tuple[str, ...]

    @property
    def bisect_code(self) -> int:
        """The exit code that `git bisect run` wants: 0 the bug is gone, 1 it is there, 125 cannot tell."""
        return {"reproduced": 1, "not reproduced": 0}.get(self.answer, CANNOT_TELL)

    @property
    def exit_code(self) -> int:
        """As of a run: 0 nothing fails, 1 something does, 4 the machine failed."""
        if self.answer == "cannot tell":
            return ExitCode.INFRA
        return ExitCode.GOOD if self.answer == "not reproduced" else ExitCode.FAILED


def reproduced(
    named: NamedCase,
    found: TrialResult,
    *,
    installed: Mapping[str, str],
    device: str,
    like: FailureSignature | None = None,
    known: Mapping[str, str] = {},
) -> Reproduced:
    """Return the answer for one run of a case. `like`: the signature to look for instead of the bug file's."""
    bug = named.bug.bug if named.bug is not None else None
    expected = like or (bug.signature if bug is not None else None)
    reported = "any failure" if bug is None else ": ".join(filter(None, (bug.symptom.replace("_", " "), bug.message)))
    return Reproduced(
        answer=_answer(found, expected, bug),
        expected=reported if expected is None else expected.text,
        found=found,
        known=known,
        differs=_differences(named, installed, device),
    )


def _answer(found: TrialResult, expected: FailureSignature | None, bug: Bug | None) -> Answer:
    if not found.decided:
        return "cannot tell"
    if found.signature is None:
        return "not reproduced"
    if expected is not None and alike(found.signature, expected):
        return "reproduced"
    if expected is not None:  # a case that only differs from an unverified formula breaks nothing that hides a failure
        return "not reproduced" if found.verdict is Verdict.CHANGED else "another failure"
    return "reproduced" if bug is None or shows(bug, found.signature) else "another failure"


def known_in(findings: Sequence[Finding], faults: Sequence[KnownFault]) -> Mapping[str, str]:
    """Those of the recorded faults that show, by name, with reason, link and what of the findings they leave open."""
    shown = [fault for fault in faults if fault.shows(findings)]
    left = sum(not any(fault.explains(finding) for fault in shown) for finding in findings)
    rest = f"; {counted(left, 'finding')} of {len(findings)} not explained by it" if left else ""
    return {fault.name: f"{fault.reason} ({fault.link}){rest}" for fault in shown}


def alike(one: FailureSignature, other: FailureSignature) -> bool:
    """True for equal signatures, and for a crash with the same exception: its calls move between versions of torch."""
    if one.kind == "crash":
        one, other = (msgspec.structs.replace(signature, where=()) for signature in (one, other))
    return one == other


def shows(bug: Bug, signature: FailureSignature) -> bool:
    """Return True when a failure is of the reported kind; of a crash with a message, when it has the words of it."""
    if bug.symptom == "hang":  # on the virtual device, ranks that call different collectives raise instead
        return signature.kind == "hang" or "CollectiveMismatch" in signature.what
    if bug.symptom in ("crash", "unknown") and signature.kind == "crash":
        words = set(_WORD.findall(normalized(bug.message)))
        return not words or len(words & set(_WORD.findall(signature.what))) >= _SHARE * len(words)
    if bug.symptom == "crash" or signature.kind in ("crash", "hang"):
        return False
    checks = _SHOWN_BY[bug.symptom]
    return checks is None or signature.check in checks


def _differences(named: NamedCase, installed: Mapping[str, str], device: str) -> tuple[str, ...]:
    """Return how the run differs from the report: versions, device, sizes."""
    if named.bug is None:
        return ()
    bug, now = named.bug.bug, axis_values(named.case)
    versions = [
        f"{package}: {version} reported, {installed.get(package, 'not installed')} here"
        for package, version in bug.versions.items()
        if installed.get(package) != version
    ]
    hardware = [f"hardware: {bug.hardware} reported, {device} here"] if bug.hardware else []
    sizes = [f"{name}: {size} reported, {now[name]} here" for name, size in named.bug.full_size.items()]
    return (*versions, *hardware, *sizes)
