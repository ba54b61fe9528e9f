"""Power: what the checks see of the planted faults, and what weaker harnesses would have seen of the same runs.

Every fault is planted in one or two carriers, judged like any case, and compared with two common ways of testing FP8
training: watching the BF16 loss, and a signal-to-noise ratio of the gradients. The carriers also run clean: a check
that fails there proves nothing.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Sequence

import msgspec

from harness.checks.assembly import assemble, relative_distance
from harness.checks.judge import Judgement
from harness.engine.wire import JobStatus
from harness.measured.golden import Golden, GoldenMissing, load_golden
from harness.planted.faults import Fault, carriers_of
from harness.planted.killmatrix import BLIND, Power, Sight, Trial
from harness.project import Project
from harness.result import CaseResult
from harness.running.briefs import Briefs, make_briefs
from harness.running.casework import CaseWork
from harness.running.executor import Executor, open_executor
from harness.running.injection import parse_injection
from harness.running.machine import hardware
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.schedule import run_schedule
from harness.running.witness import WitnessBench
from harness.spec.case import Case
from harness.spec.caseid import case_id, family_id
from harness.trace import Run
from harness.verdict import Finding
from harness.workflow import check_fits


def run_power(project: Project, faults: Sequence[Fault], plan: Plan, progress: Progress, *, carriers: int) -> Power:
    """Run every fault in up to `carriers` of its carriers, and these carriers clean. Ctrl-C keeps what was run."""
    started_s = time.monotonic()
    cases = {fault.name: carriers_of(fault, at_most=carriers) for fault in faults}
    used = tuple({case_id(case): case for found in cases.values() for case in found}.values())
    check_fits(used, plan)
    progress.begin(len(used) + sum(map(len, cases.values())))
    trials: list[Trial] = []
    with open_executor(plan.serving(used), project) as executor:
        session = _Session(project, used, plan, executor, progress)
        clean, interrupted = session.run(None, used)
        for fault in faults:
            if interrupted:
                break
            found, interrupted = session.run(fault, cases[fault.name])
            trials += found
    return Power(trials=tuple(trials), clean=tuple(clean), wall_s=time.monotonic() - started_s, interrupted=interrupted)


class _Session:
    """Runs trials on one engine. The witnesses are run once, without faults."""

    def __init__(
        self, project: Project, cases: Sequence[Case], plan: Plan, executor: Executor, progress: Progress
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._progress = progress
        self._briefs = make_briefs(project, cases, hardware=hardware(plan.device))
        self._goldens = {case_id(case): _golden(project, case, plan) for case in cases}
        self._crying: dict[str, frozenset[str]] = {}  # checks that have findings in the clean run of a case
        self._bench = WitnessBench(executor, project.witness_folder(), plan)

    def run(self, fault: Fault | None, cases: Sequence[Case]) -> tuple[list[Trial], bool]:
        """The trials of one fault, or clean ones, and whether they were interrupted."""
        injections = () if fault is None else (parse_injection(fault.injection),)
        plan = msgspec.structs.replace(self._plan, injections=injections)
        watching = _Watching(self._briefs, self._goldens)
        work = CaseWork(plan, self._executor.with_plan(plan), watching, self._bench, self._progress.note)
        ended = run_schedule(cases, work, self._progress, jobs=plan.jobs)
        results = [result for result in ended.results if result is not None]
        if fault is None:
            self._crying = {result.case_id: _checks(result) for result in results}
        return [self._trial(fault, result, watching) for result in results], ended.interrupted

    def _trial(self, fault: Fault | None, result: CaseResult, watching: _Watching) -> Trial:
        crying = frozenset() if fault is None else self._crying.get(result.case_id, frozenset())
        return _trial(fault, result, watching.sight(result.case_id), crying)


class _Watching:
    """Judges by the briefs, and notes what weaker harnesses see. It is the `Judge` of `casework.py`."""

    def __init__(self, briefs: Briefs, goldens: dict[str, Golden | None]) -> None:
        self.expectation = briefs.expectation
        self._briefs = briefs
        self._goldens = goldens
        self._seen: dict[str, Sight] = {}
        self._lock = threading.Lock()

    def sight(self, name: str) -> Sight:
        """What weaker harnesses saw of the last run of a case."""
        return self._seen.get(name, BLIND)

    def judge(self, case: Case, run: Run, status: JobStatus, bench: WitnessBench) -> Judgement:
        """The verdict of the briefs."""
        judgement = self._briefs.judge(case, run, status, bench)
        if run.complete:
            name = case_id(case)
            sight = weaker_sight(run, self._goldens[name], bench.solo(case))
            with self._lock:
                self._seen[name] = sight
        return judgement


def weaker_sight(run: Run, golden: Golden | None, solo: Run | None) -> Sight:
    """What a watcher of the BF16 loss and one of the gradients' signal-to-noise ratio see of a finished run."""
    losses = [[step.loss for step in trace.steps] for trace in run.traces]
    gaps = [
        abs(loss - expected) if math.isfinite(loss) else math.inf
        for curve in losses
        for loss, expected in zip(curve, golden.losses if golden is not None else curve, strict=False)
    ]
    return Sight(loss_gap=max(gaps, default=math.inf), sqnr_db=None if solo is None else _worst_sqnr(run, solo))


def _worst_sqnr(run: Run, solo: Run) -> float | None:
    """Decibels of the worst gradient of the first step; infinite when all are equal, NaN becomes minus infinity."""
    found, expected = assemble(run.traces), assemble(solo.traces)
    keys = [key for key in expected if key.step == 1 and key.kind == "grad" and key in found]
    distances = [relative_distance(found[key], expected[key]) for key in keys]
    if not distances:
        return None
    worst = max(math.inf if math.isnan(distance) else distance for distance in distances)
    return math.inf if worst == 0 else -20 * math.log10(worst)


def _golden(project: Project, case: Case, plan: Plan) -> Golden | None:
    try:
        return load_golden(project.root, hardware(plan.device), family_id(case))
    except GoldenMissing:
        return None


def _checks(result: CaseResult) -> frozenset[str]:
    return frozenset(finding.check for finding in result.findings)


def _trial(fault: Fault | None, result: CaseResult, sight: Sight, crying: frozenset[str]) -> Trial:
    findings = [finding for finding in result.findings if finding.check not in crying]
    steps = [finding.step for finding in findings if finding.step is not None]
    excesses = [value for value in map(_excess, findings) if value is not None]
    return Trial(
        fault=fault.name if fault is not None else None,
        group=fault.group if fault is not None else None,
        equivalent=fault is not None and fault.equivalent is not None,
        case_id=result.case_id,
        verdict=result.verdict,
        checks=tuple(sorted({finding.check for finding in findings})),
        first_step=min(steps, default=None),
        excess=max(excesses, default=None),
        message=findings[0].message.splitlines()[0] if findings else "",
        sight=sight,
    )


_LIMIT = re.compile(r"<= ([0-9.e+-]+)$")


def _excess(finding: Finding) -> float | None:
    """How far above its limit a finding is, when it states both numbers."""
    limit = _LIMIT.search(finding.expected or "")
    try:
        found = float(finding.found or "")
        return found / float(limit[1]) if limit else None
    except (ValueError, ZeroDivisionError):
        return None
