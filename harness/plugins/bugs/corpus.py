"""Proves bug files: live bugs fail as recorded; fixed ones pass, and fail again with each of their injected faults."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from harness.checks.fp8_on import TRAINED
from harness.errors import HarnessError
from harness.hints import LIST_BUGS
from harness.matrix.axes import suggestion
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.choice import carries, catalogue_of_faults
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.plugins.bugs.bugfile import BugFile, Status, read_bugs
from harness.project import Project
from harness.registry import answer
from harness.running.case_judge import known_here
from harness.running.executor import Executor
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.selection import recorded_faults
from harness.verdict import ExitCode, Verdict

_WHERE = "bug check"
Trials = Mapping[tuple[str | None, str], Any]  # by the injected fault, None for a clean run, and the id of the case
_UNDECIDED = (Verdict.INFRA, Verdict.NOT_RUN)


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one bug file show.

    `clean` and `planted`: how the case ended, by fault; without a run that was interrupted. `detected_by`: of the
    checks that the file names, those that found the bug. `mismatches`: what is not as the file says. `undecided`: runs
    that say nothing, because the machine failed or they were interrupted. `elsewhere`: the versions that have a live
    bug; empty if the installed ones do.
    """

    bug: str
    title: str
    status: Status
    case_id: str
    clean: Verdict | None
    planted: Mapping[str, Verdict]
    detected_by: tuple[str, ...]
    mismatches: tuple[str, ...]
    undecided: tuple[str, ...]
    elsewhere: str = ""


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """The proofs of all bug files that were checked, in their order."""

    proofs: tuple[Proof, ...]
    wall_s: float
    interrupted: bool

    @property
    def exit_code(self) -> ExitCode:
        """As of a run: a mismatch fails, the machine alone is `INFRA`."""
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if any(proof.mismatches for proof in self.proofs):
            return ExitCode.FAILED
        if any(proof.undecided for proof in self.proofs):
            return ExitCode.INFRA
        return ExitCode.GOOD if self.proofs else ExitCode.NOTHING_RAN


def provable_bugs(project: Project, names: Sequence[str]) -> tuple[BugFile, ...]:
    """The live and fixed bugs of these names, or all of the project. HarnessError for a name that is none of them."""
    bugs = {bug.id: bug for bug in read_bugs(project.bugs)}
    for name in names:
        if name not in bugs:
            fix = suggestion(name, bugs, listed=LIST_BUGS) if bugs else f"write {name}.toml there."
            raise HarnessError(f"no bug file is named '{name}'.", where=str(project.bugs), fix=fix)
        if bugs[name].bug.status not in ("live", "fixed"):
            what = f"a bug that is {bugs[name].bug.status} proves nothing."
            raise HarnessError(what, where=bugs[name].where, fix="name bugs that are live or fixed.")
    chosen = [bugs[name] for name in names] or bugs.values()
    return tuple(bug for bug in chosen if bug.bug.status in ("live", "fixed"))


def _fault_named(name: str) -> Any:
    return catalogue_of_faults(_WHERE).fault_named(name)


def check_corpus(
    project: Project, bugs: Sequence[BugFile], plan: Plan, progress: Progress, executor: Executor | None = None
) -> Corpus:
    """Run the case of every bug, and of fixed ones with each of their injected faults. Ctrl-C keeps what finished."""
    records, known = recorded_faults(project), known_here(project)
    hosts: dict[str, dict[str, Case]] = {}
    for bug in bugs:
        case = bug.runnable()
        for name in bug.bug.planted:
            if carries(case, _fault_named(name), known):
                hosts.setdefault(name, {})[case_id(case)] = case
    matrix = answer("mutation testing", where=_WHERE).run_mutations(
        project,
        [_fault_named(name) for name in hosts],
        {name: tuple(cases.values()) for name, cases in hosts.items()},
        plan,
        progress,
        others=[bug.runnable() for bug in bugs],
        executor=executor,
    )
    return proofs(bugs, matrix, known, records)


def proofs(bugs: Sequence[BugFile], matrix: Any, known: Sequence[KnownFault], records: Sequence[KnownFault]) -> Corpus:
    """Return the proofs of these bugs. `known`: those of the `records` that the installed versions have."""
    trials = {(trial.fault, trial.case_id): trial for trial in (*matrix.trials, *matrix.clean)}
    bug_proofs = tuple(
        _live(bug, trials, _elsewhere(bug, known, records)) if bug.bug.status == "live" else _fixed(bug, trials, known)
        for bug in bugs
    )
    return Corpus(proofs=bug_proofs, wall_s=matrix.wall_s, interrupted=matrix.interrupted)


def _elsewhere(bug: BugFile, known: Sequence[KnownFault], records: Sequence[KnownFault]) -> str:
    """Return the versions that the bug is recorded for; empty if they include the installed ones."""
    case = bug.runnable()
    versions = dict.fromkeys(record.versions for record in matching(records, case))
    return "" if matching(known, case) else " or ".join(versions)


def _live(bug: BugFile, trials: Trials, elsewhere: str) -> Proof:
    """Mismatches of a live bug: it must fail as recorded or be refused, by every rule that the file names.

    With versions that do not have it, it must pass.
    """
    case = bug.runnable()
    clean = trials.get((None, case_id(case)))
    refusal = expected_refusal(case)
    if clean is None or clean.verdict in _UNDECIDED:
        return _proof(bug, {None: clean}, (), ())
    if elsewhere and refusal is None:
        wrong = [] if clean.verdict is Verdict.PASSED else [f"only {elsewhere} has it, but it {_ended_how(clean)}"]
        return msgspec.structs.replace(_proof(bug, {None: clean}, (), wrong), elsewhere=elsewhere)
    if clean.verdict is not (Verdict.KNOWN if refusal is None else Verdict.PASSED):
        words = "fail as recorded" if refusal is None else f"be refused ({refusal.name})"
        return _proof(bug, {None: clean}, (), [f"it must {words}, but it {_ended_how(clean)}"])
    seen = clean.rules if refusal is None else (TRAINED.name,)  # which finds it where it is not refused
    return _proof(bug, {None: clean}, seen, _not_among(bug, seen))


def _fixed(bug: BugFile, trials: Trials, known: Sequence[KnownFault]) -> Proof:
    """Mismatches of a fixed bug: it must pass, and a rule that the file names must find each injected fault."""
    case = bug.runnable()
    planted = [name for name in bug.bug.planted if carries(case, _fault_named(name), known)]
    runs = {fault: trials.get((fault, case_id(case))) for fault in (None, *planted)}
    ended = {fault: trial for fault, trial in runs.items() if trial is not None and trial.verdict not in _UNDECIDED}
    faulty = {fault: trial for fault, trial in ended.items() if fault is not None}
    seen = {rule for trial in faulty.values() for rule in trial.rules}
    wrong = _unprovable(bug, planted)
    if None in ended:
        wrong += _unclean(bug, ended[None], matching(known, case))
    wrong += [mismatch for fault, trial in faulty.items() for mismatch in _unfound(bug, fault, trial)]
    if not wrong and len(ended) == len(runs):
        wrong += _not_among(bug, seen)
    return _proof(bug, runs, seen, wrong)


def _unprovable(bug: BugFile, planted: Sequence[str]) -> list[str]:
    """Return why a fixed bug cannot be proved by its case."""
    if expected_refusal(bug.runnable()) is not None:
        return ["it is refused: a fixed bug trains"]
    if not bug.bug.planted:
        return ["no injected fault brings it back"]
    return [f"{name} cannot be planted in it" for name in bug.bug.planted if name not in planted]


def _unclean(bug: BugFile, clean: Any, records: Sequence[KnownFault]) -> list[str]:
    """Return why the clean run contradicts `fixed`: only another, recorded bug may show in it."""
    if not clean.verdict.good:
        return [f"it must pass, but it {_ended_how(clean)}"]
    if clean.verdict is Verdict.KNOWN and any(record.link == bug.bug.link for record in records):
        return ["it is recorded in known.toml: it is live"]
    return []


def _unfound(bug: BugFile, fault: str, trial: Any) -> list[str]:
    if not trial.detected:
        return [f"with {fault} it {trial.verdict.phrase}: {trial.not_reached or 'no check found the fault'}"]
    if not set(trial.rules) & set(bug.bug.detected_by):
        return [f"{fault} is found by {', '.join(trial.rules)}, not by {', '.join(bug.bug.detected_by)}"]
    return []


def _not_among(bug: BugFile, seen: Collection[str]) -> list[str]:
    lost = [name for name in bug.bug.detected_by if name not in seen]
    return [f"{', '.join(lost)} found nothing; found by {', '.join(sorted(seen)) or 'nothing'}"] if lost else []


def _ended_how(trial: Any) -> str:
    return f"{trial.verdict.phrase}: {trial.message}" if trial.message else trial.verdict.phrase


def _proof(bug: BugFile, runs: Mapping[str | None, Any], seen: Collection[str], wrong: Sequence[str]) -> Proof:
    clean = runs[None]
    undecided = [
        f"{fault or 'the clean run'} {'was not run' if trial is None else trial.verdict.phrase}"
        for fault, trial in runs.items()
        if trial is None or trial.verdict in _UNDECIDED
    ]
    return Proof(
        bug=bug.id,
        title=bug.bug.title,
        status=bug.bug.status,
        case_id=case_id(bug.runnable()),
        clean=None if clean is None else clean.verdict,
        planted={fault: trial.verdict for fault, trial in runs.items() if fault is not None and trial is not None},
        detected_by=tuple(name for name in bug.bug.detected_by if name in seen),
        mismatches=tuple(wrong),
        undecided=tuple(undecided),
    )
