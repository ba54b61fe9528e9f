"""The steps of a run, in order: the table of contents of this program.

    select  ->  plan cases and references  ->  run on ranks  ->  judge  ->  store  ->  result

Owns the order of the steps, what `--lf` runs again of the last run, and which run `--resume` finishes; each other step
is a function or a class of the file it is imported from. Making references (`studies/records.py`) is the same way with
another judge.
"""

import contextlib
import math
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from harness.engine.hardware import Device
from harness.engine.linux import cpu_s
from harness.errors import HarnessError
from harness.evidence.references import Reference
from harness.hints import run_cases as run_command
from harness.hints import update_missing
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id
from harness.project import Project
from harness.result import CaseResult, Environment, ReferenceRun, RunEnd, RunResult, RunStart
from harness.run_options import RunOptions
from harness.running.case_judge import CaseJudge, prepare_judge
from harness.running.case_runner import CaseRunner, Judge, Review, as_judged
from harness.running.executor import open_executor
from harness.running.identity import check_targets, environment
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.references import ReferenceLost, ReferenceRunner, open_references
from harness.running.schedule import Ended, run_schedule
from harness.running.selection import (
    NothingSelected,
    Query,
    cases_within,
    excluded_cells,
    quarantined_cases,
    recorded_costs,
    select_for_target,
    select_sources,
)
from harness.running.stored import Stored, remove_old_runs, runs_of
from harness.sources import installed_version
from harness.store import RunStore
from harness.text import counted, timestamp


def run(
    project: Project, query: Query, plan: Plan, progress: Progress, *, hints: bool = True, since_s: float | None = None
) -> tuple[RunResult, Path]:
    """Run the cases that `query` selects; the results, and the file where they are stored.

    `hints`: say how to store references that are not there. `since_s`: `cpu_s()` from which on this process is the
    run's; None: from now on.
    Raises `HarnessError` before any rank starts when the input is bad. A case that fails is a result, never an error.
    """
    since_s = cpu_s() if since_s is None else since_s
    cases, left_out = _in_budget(project, query, progress)
    judge, plan = prepared(project, cases, plan, progress.note)
    _announce(judge, progress, query, plan, store=hints and not project.is_shipped)
    start = msgspec.structs.replace(
        run_start(project, plan, tuple(map(case_id, cases))),
        left_out=left_out,
        shard="" if query.shard is None else query.shard.text,
        argv=(*query.words_with_absolute_paths, *plan.given.words, *(("--name", plan.name) if plan.name else ())),
    )
    store = RunStore(project.new_run(), progress.note)
    for sentence in project.replaced_tiers(query.effective_sources):
        progress.note(sentence)
    with store.locked():
        store.begin(start)
        remove_old_runs(project)
        result = run_cases(project, cases, plan, judge, progress, keep=store.append)
        result = _with_own_cpu(msgspec.structs.replace(result, start=start), plan, since_s)
        store.finish(result)
    return result, store.path


def run_start(project: Project, plan: Plan, cases: tuple[str, ...]) -> RunStart:
    """Return what is known of a run of these cases that starts now; its `argv` names them one by one."""
    return RunStart(
        cases=cases,
        options=plan.given,
        environment=environment(plan, project.root, (parse_case_id(name).target for name in cases)),
        name=plan.name,
        started=timestamp(),
        argv=(*cases, *plan.given.words),
    )


def _with_own_cpu(result: RunResult, plan: Plan, since_s: float) -> RunResult:
    """Return the result with what the harness itself took. Ranks are its descendants, except those of a Ray cluster."""
    ranks_s = 0.0 if plan.launcher == "ray" else sum(result.all_cpu_s.values())
    own_s = max(0.0, cpu_s() - since_s - ranks_s)
    return msgspec.structs.replace(result, end=msgspec.structs.replace(result.end, harness_cpu_s=own_s))


def resume(
    project: Project, stopped: Stored, plan: Plan, progress: Progress, *, since_s: float
) -> tuple[RunResult, Path]:
    """Run the cases that a run has no result of; the results of the whole run, and its file. `since_s`: as of `run`.

    Raises `HarnessError` before any rank starts when the environment changed, or when another process does the same.
    """
    store = RunStore(stopped.path, progress.note)
    with store.locked() as alone:
        if not alone:
            raise HarnessError("another process runs it.", where="--resume", fix="wait for its end.")
        stored = store.read()
        targets = (parse_case_id(name).target for name in stored.start.cases)
        check_environment(stored.start, environment(plan, project.root, targets), plan)
        cases = [parse_case_id(result.case_id) for result in stored.results if not result.ran]
        judge, plan = prepared(project, cases, plan, progress.note)
        called = f"{stored.start.name}, started {stored.start.started}" if stored.start.name else stored.start.started
        for text in stored.damaged:
            progress.note(f"{text}. Its case runs again.")
        progress.note(f"resumes the run {called}: {len(cases)} of {len(stored.results)} cases are left.")
        rest = run_cases(project, cases, plan, judge, progress, keep=store.append)
        whole = _joined(stored, _with_own_cpu(rest, plan, since_s))
        store.finish(whole)
    return whole, store.path


def _joined(earlier: RunResult, rest: RunResult) -> RunResult:
    """Return the results of a run that was resumed, with the seconds and references of both parts."""
    later = {result.case_id: result for result in rest.results}
    return msgspec.structs.replace(
        earlier,
        results=tuple(later.get(result.case_id, result) for result in earlier.results),
        end=msgspec.structs.replace(
            rest.end,
            wall_s=earlier.end.wall_s + rest.end.wall_s,
            harness_cpu_s=earlier.end.harness_cpu_s + rest.end.harness_cpu_s,
            references=(*earlier.end.references, *rest.end.references),
        ),
    )


def prepared(
    project: Project, cases: Sequence[Case], plan: Plan, note: Callable[[str], None], *, goldens: bool = True
) -> tuple[CaseJudge, Plan]:
    """Return what the cases are checked by, and the plan that knows which of them are quarantined.

    `goldens`: as of `CaseJudge`.

    Raises `HarnessError` when one of them cannot be run here.
    """
    check_fits(cases, plan)
    check_targets((case.target for case in cases), project.root)
    quarantined = quarantined_cases(project, cases, note)
    judge = prepare_judge(project, cases, plan, goldens=goldens)
    return judge, msgspec.structs.replace(plan, quarantined=quarantined)


def _in_budget(project: Project, query: Query, progress: Progress) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    cases, excluded = select_for_target(project, query)
    for reason, count in excluded.items():
        progress.note(f"left out, {count} of the cases: {reason}.")
    if remark := excluded_cells(project, query):
        progress.note(f"{remark}.")
    if query.shard is not None and not cases:
        progress.note(f"shard {query.shard.text} has no case: fewer cases than shards are selected.")
    if query.budget_s is None or not cases:
        return cases, ()
    budgeted = cases_within(project, cases, select_sources(project, query), query.budget_s)
    progress.note(f"budget of {query.budget_s:g} s: {len(budgeted.cases)} of {len(cases)} cases.")
    return budgeted.cases, tuple(case_id(case) for case in budgeted.left_out)


class _Made(msgspec.Struct, frozen=True):
    name: str
    seconds: float


def run_cases(  # noqa: PLR0913  what is run where, and who is told
    project: Project,
    cases: Sequence[Case],
    plan: Plan,
    judge: Judge,
    progress: Progress,
    *,
    keep: Callable[[CaseResult], None] | None = None,
    review: Review = as_judged,
) -> RunResult:
    """Run the given cases and their references on the ranks of one engine; Ctrl-C leaves the rest as `not_run`.

    `keep` is given every result the moment it is there, `review` every judgement before the records are dropped.
    """
    started_s = time.monotonic()
    teller = _Teller(progress, keep, plan.max_failures)
    results: dict[str, CaseResult] = {}
    made: list[ReferenceRun] = []
    interrupted = False
    for own, positions in plan.parts(cases):
        part = [cases[position] for position in positions]
        with open_executor(own.serving(part), project, progress.note) as executor:
            references = open_references(project, own, executor)
            runner = CaseRunner(own, executor, judge, references, review)
            work = _planned(project, part, judge, references)
            ahead = [item for item in work if isinstance(item, Reference)]
            progress.begin(
                len(ahead) + len(cases),
                references=[reference.name for reference in ahead],
                costs=recorded_costs(project, part, ahead),
                jobs=own.jobs,
            )
            ended: Ended[CaseResult | _Made] = run_schedule(
                work,
                partial(_done, runner, references),
                executor.stop,
                jobs=own.jobs,
                started=lambda item: progress.started(*_told(item)),
                finished=teller.finished,
                size=lambda _: 0.0,  # in the order of `work`
            )
        results |= {result.case_id: result for result in ended.results if isinstance(result, CaseResult)}
        made += references.log
        interrupted = ended.interrupted
        if interrupted or teller.enough:
            break
    every = [results.get(case_id(case)) or runner.not_run(case) for case in cases]
    return RunResult(
        results=tuple(every),
        end=RunEnd(
            wall_s=time.monotonic() - started_s,
            interrupted=interrupted,
            provenance=provenance(every, plan),
            references=tuple(made),
        ),
    )


def _planned(
    project: Project, cases: Sequence[Case], judge: Judge, references: ReferenceRunner
) -> list[Case | Reference]:
    """Return the cases, each after those of its references that can start and that no earlier case wants.

    The longest are first: one that is left at the end keeps a single core busy.
    """
    work: list[Case | Reference] = []
    planned: set[str] = set()
    costs = recorded_costs(project, cases, ())
    for case in sorted(cases, key=lambda case: (-costs.get(case_id(case), 0.0), -case.world_size)):
        for reference in judge.needs(case):
            if reference.request is not None and reference.name not in planned and not references.is_kept(reference):
                planned.add(reference.name)
                work.append(reference)
        work.append(case)
    return work


def _told(item: Case | Reference) -> tuple[str, int]:
    return item.name if isinstance(item, Reference) else case_id(item), item.world_size


def _done(runner: CaseRunner, references: ReferenceRunner, item: Case | Reference, /) -> CaseResult | _Made | None:
    if not isinstance(item, Reference):
        return runner.run(item)
    began_s = time.monotonic()
    with contextlib.suppress(ReferenceLost):  # the case that wants it tries again, and says so
        references.get(item, ahead=True)
    return _Made(item.name, time.monotonic() - began_s)


def check_fits(cases: Sequence[Case], plan: Plan) -> None:
    """Raise `HarnessError` when a case cannot run: it needs more ranks than there are slots, or what the GPUs lack."""
    placed = [(cases[position], own) for own, positions in plan.parts(cases) for position in positions]
    blocked = [(case, own, obstacle) for case, own in placed if (obstacle := own.obstacle(case)).why]
    if not blocked:
        return
    case, own, first = blocked[0]
    some = sum(obstacle.why == first.why for _, _, obstacle in blocked)
    if case.world_size > own.most_ranks(case):
        what = f"{some} of {len(cases)} cases need more than the {own.most_ranks(case)} slots there are."
    else:
        what = f"{some} of {len(cases)} cases cannot run on {own.capacity.words}: {first.why}."
    exact = "--arithmetic exact, or " if first.exact else ""
    on_cuda = f"give {exact}--device auto, which runs unsupported cases on the CPU."
    fix = on_cuda if own.device == "cuda" else "give --slots N, or leave such cases out by --select."
    raise HarnessError(what, where=case_id(case), fix=fix)


class _Teller:
    """Keeps results and tells of them. `enough`: so many cases failed that no other is wanted."""

    def __init__(self, progress: Progress, keep: Callable[[CaseResult], None] | None, max_failures: int | None) -> None:
        self.enough = False
        self._progress = progress
        self._keep = keep
        self._left = math.inf if max_failures is None else max_failures

    def finished(self, result: CaseResult | _Made) -> bool:
        """Return `enough`."""
        if isinstance(result, _Made):
            line = f"{'reference':<15} {result.seconds:7.1f} s  {result.name}"
            self._progress.finished(result.name, line, remarkable=False)
            return self.enough
        if self._keep is not None:
            self._keep(result)
        if not result.verdict.good and not result.excused:
            self._left -= 1
            if self._left == 0:
                self._progress.note("enough cases failed: stopping.")
        line = f"{result.verdict.value:<15} {result.seconds:7.1f} s  {result.case_id}"
        self._progress.finished(result.case_id, line, remarkable=not result.verdict.good)
        self.enough = self._left <= 0
        return self.enough


def _announce(judge: CaseJudge, progress: Progress, query: Query, plan: Plan, *, store: bool) -> None:
    """Say before the run, not after it, who else uses the GPUs, and what cases are compared with that is not stored."""
    device = () if plan.given.device is None or plan.sides is not None else ("--device", plan.given.device)
    asked = (*query.words, *device)
    for node in plan.capacity.nodes:
        for sentence in node.in_use:
            progress.note(sentence if len(plan.capacity.nodes) == 1 else f"{node.host}: {sentence}")
    families: dict[Device, set[str]] = {}
    for case in map(parse_case_id, judge.without_golden):
        families.setdefault(plan.choice(case).device, set()).add(family_id(case))
    for where, missing in families.items():
        there = (*asked, "--device", where) if plan.sides is not None else asked
        fix = f" To store them: `{update_missing('goldens', there, root=plan.root_option)}`." if store else ""
        of_others = len(missing.intersection(judge.goldens_of_other_builds))
        why = f" for this build ({of_others} of an unreleased one, for which alone it holds)" if of_others else ""
        progress.note(
            f"{counted(len(missing), 'golden')} not stored{why}: "
            f"BF16 references are run on this machine in their place and kept.{fix}"
        )
    profiles = [name for name in judge.missing_profiles if plan.choice(parse_case_id(name)).device == "cpu"]
    if profiles:
        fix = f" To record them: `{update_missing('profiles', asked, root=plan.root_option)}`." if store else ""
        progress.note(
            f"{counted(len(profiles), 'profile')} not recorded, so traffic and memory there are not checked.{fix}"
        )


def provenance(results: Sequence[CaseResult], plan: Plan) -> dict[str, str]:
    """Return what the run was made with: versions, device, launcher, rank program."""
    firsts = [result.run.traces[0] for result in results if result.run is not None and result.run.traces]
    software = firsts[0].software if firsts else {"python": platform.python_version()}
    return {
        "fp8-harness": installed_version("fp8-harness") or "not installed",
        **dict(sorted(software.items())),
        "device": ", ".join(dict.fromkeys(trace.device for trace in firsts)) or plan.device,
        "launcher": plan.launcher,
        "backend": plan.backend,
        "program": plan.program,
    }


_RUN_AGAIN = "run the tier of that run again."


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """The query for what is not known to be good in the last run, and the options of that run.

    `notes` say what is peculiar about it.
    """

    query: Query
    options: RunOptions
    notes: tuple[str, ...]


def rerun_query(project: Project) -> Rerun:
    """What to run again of the last stored run: the cases that were not good, and those without a readable result.

    Raises `NothingSelected` when there is no such run or no such case.
    """
    stored = (RunStore(path).read() for path in reversed(project.stored_runs()))
    last = next((run for run in stored if run.results or run.damaged), None)
    if last is None:
        raise NothingSelected("there is no earlier run.", where="--lf", fix="run a tier first.")
    failed = [result.case_id for result in last.results if result.ran and not result.good]
    missing = [result.case_id for result in last.results if not result.ran]
    # The list of cases names those of damaged lines too.
    nameless = [] if last.start.cases else [text for text, name in last.damaged.items() if name is None]
    if not failed and not missing:
        if nameless:
            raise NothingSelected(f"{nameless[0]}. No other case failed.", where="--lf", fix=_RUN_AGAIN)
        raise NothingSelected("nothing failed in the last run.", where="--lf")
    lost = [
        f"{text}. It does not say which case it was. Fix: {_RUN_AGAIN}" if text in nameless else f"{text}."
        for text in last.damaged
    ]
    notes = [*([_missing_text(missing, last.start.cases)] if missing and last.start.cases else []), *lost]
    return Rerun(query=Query(sources=(*failed, *missing)), options=last.start.options, notes=tuple(notes))


def _missing_text(missing: Sequence[str], planned: Sequence[str]) -> str:
    have, they_run = ("has", "It runs") if len(missing) == 1 else ("have", "They run")
    return (
        f"{len(missing)} of {len(planned)} cases of the last run {have} no result: it was killed or still runs, or the "
        f"result is damaged. {they_run} now."
    )


def run_to_resume(project: Project) -> Stored:
    """The last run of this machine that was interrupted or killed; `NothingSelected` when none has cases left."""
    for run in runs_of(project):
        stopped = run.state in ("interrupted", "killed") and not run.is_imported
        if stopped and not all(result.ran for result in RunStore(run.path).read().results):
            return run
    raise NothingSelected("no run that was interrupted or killed has cases left.", where="--resume")


def check_environment(start: RunStart, now: Environment, plan: Plan) -> None:
    """Raise HarnessError if the environment is not the one in which the run began."""
    if differences := (start.environment or Environment()).differences(now):
        raise HarnessError(
            f"since this run began ({start.started}), this changed: {', '.join(differences)}. "
            "Its results would be of two environments.",
            where="--resume",
            fix=f"run it anew: `{run_command(*start.argv, root=plan.root_option)}`.",
        )
