"""Mutation testing: which injected faults the checks detect, compared with two common ways of testing FP8 training.

Every fault is injected into one or two cases (its host cases), which are checked like any case. The baselines compare
the loss with BF16, and the gradients by signal-to-quantization-noise ratio (SQNR). The host cases also run clean:
checks that fail there detect nothing. A host case that crashes as recorded runs with the candidate fix, under the fault
and clean.

A fault that changed nothing that a run records proves nothing about the checks, and one that raised while it was
injected even less: its trial is `not_reached`.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

import msgspec

from harness.checks.assembly import assemble, nan_as_inf, relative_distance
from harness.checks.check import finished
from harness.checks.judge import Judgement
from harness.evidence.costs import read_costs
from harness.evidence.golden import Golden, find_golden
from harness.evidence.references import solo_reference
from harness.evidence.sealed import Missing
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id
from harness.matrix.choice import carries
from harness.plugins.faults.faults import NEEDS, Fault, FaultClass, all_faults
from harness.plugins.faults.kills import Kill, Kills, scores
from harness.project import Project
from harness.registry import REFERENCE
from harness.result import CaseResult
from harness.running.case_judge import known_here, prepare_judge
from harness.running.case_runner import CaseRunner, Judged
from harness.running.executor import Executor, open_executor
from harness.running.plan import Plan, parse_injection
from harness.running.progress import Progress
from harness.running.references import open_references
from harness.running.schedule import run_schedule
from harness.running.selection import Query, select_cases, trained_by
from harness.sources import installed_versions
from harness.trace import RankFailure, Run
from harness.verdict import Finding, Verdict, check_of
from harness.workflow import check_fits

LOSS_ONLY_NATS = 0.01  # what counts as a difference when loss curves are compared
SQNR_DB = 20.0  # the usual threshold in unit tests of FP8 code
_FAULTS = "harness/plugins/faults/worker/"
NO_EFFECT = "every loss, gradient, operand, transfer and saved byte is the same as in the clean run"

Hosts = Mapping[str, Sequence[Case]]  # by the name of a fault


class BaselineDetection(msgspec.Struct, frozen=True, kw_only=True):
    """What two common ways of testing FP8 training detect in a run: comparing losses, and the SQNR of gradients.

    `loss_gap`: largest |loss - golden| in nats, infinite for a run that did not finish. `sqnr_db`: of the worst
    gradient of the first step against the single-rank reference; None if there is nothing to compare.
    """

    loss_gap: float
    sqnr_db: float | None

    @property
    def by_loss(self) -> bool:
        return not self.loss_gap <= LOSS_ONLY_NATS

    @property
    def by_sqnr(self) -> bool:
        """Return True if the SQNR is too low or the run did not finish."""
        return math.isinf(self.loss_gap) or (self.sqnr_db is not None and not self.sqnr_db > SQNR_DB)


UNFINISHED = BaselineDetection(loss_gap=math.inf, sqnr_db=None)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a host case, with an injected fault or clean."""

    fault: str | None  # None: clean
    group: FaultClass | None
    equivalent: bool
    case_id: str
    verdict: Verdict
    rules: tuple[str, ...]  # that are broken, sorted, without those of checks that also fail in the clean run
    first_step: int | None
    excess: float | None  # the largest found/allowed of the findings that state both
    message: str  # of the first finding
    misnamed: tuple[str, ...] | None = None  # what it names otherwise or not at all; None if there is no finding
    baseline: BaselineDetection = msgspec.field(name="sight")
    parity: float | None = None  # the largest relative distance of a gradient from solo; None if not compared
    not_reached: str = ""  # why it is not a trial of the checks: the fault changed nothing, or broke when injected

    @property
    def checks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(check_of, self.rules)))

    @property
    def detected(self) -> bool:
        """Return True if a check, or the engine, failed that does not fail in the clean run of the case."""
        judged = not self.verdict.good and self.verdict not in (Verdict.INFRA, Verdict.NOT_RUN)
        return judged and bool(self.checks) and not self.not_reached

    @property
    def is_proof(self) -> bool:
        return not self.equivalent and not self.not_reached

    @property
    def name(self) -> str:
        return f"{self.fault or 'clean'} in {self.case_id}"


class MutationMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The mutation matrix: a trial of every fault in each of its host cases, and the clean runs of the host cases."""

    trials: tuple[Trial, ...]
    clean: tuple[Trial, ...]
    not_planted: dict[str, str] = {}  # faults, and what they need
    wall_s: float
    interrupted: bool

    @property
    def false_positives(self) -> tuple[Trial, ...]:
        """Clean runs that failed: detections in these host cases prove nothing."""
        return tuple(trial for trial in self.clean if not trial.verdict.good)

    @property
    def undetected(self) -> tuple[Trial, ...]:
        """Return the trials of faults that must be detected and were not."""
        return tuple(trial for trial in self.trials if trial.is_proof and not trial.detected)

    @property
    def scored(self) -> tuple[Trial, ...]:
        """Detections: each has a headline."""
        return tuple(trial for trial in self.trials if trial.detected and trial.misnamed is not None)

    @property
    def scores(self) -> dict[FaultClass, Counter[str]]:
        """Return a table of how many headlines of every class are right."""
        return scores((trial.group, trial.misnamed or ()) for trial in self.scored if trial.group is not None)

    @property
    def misnamed(self) -> tuple[Trial, ...]:
        """Of them those whose headline names something else, or less than their class demands."""
        return tuple(trial for trial in self.scored if trial.misnamed)

    @property
    def not_reached(self) -> tuple[Trial, ...]:
        """Return the trials of faults that did not reach the target."""
        return tuple(trial for trial in self.trials if trial.not_reached)

    @property
    def unplantable(self) -> tuple[Trial, ...]:
        """Of them those in cases that the list names for the fault: there it must have an effect."""
        return tuple(trial for trial in self.not_reached if parse_case_id(trial.case_id).target == REFERENCE)


def hosts_among(project: Project, faults: Sequence[Fault], query: Query, *, at_most: int) -> Hosts:
    """Return the cases to plant every fault in: the cheapest of `query`, or the catalogue's, on its target."""
    known = known_here(project)
    if msgspec.structs.replace(query, target=None) == Query():
        usual = {fault.name: trained_by(query.target, fault.hosts()) for fault in faults}
    else:
        cheapest = tuple(sorted(select_cases(project, query), key=read_costs(project.root).case_s))
        usual = dict.fromkeys((fault.name for fault in faults), cheapest)
    return {
        fault.name: [case for case in usual[fault.name] if carries(case, fault, known)][:at_most] for fault in faults
    }


def run_mutations(  # noqa: PLR0913  what is injected where, and what runs it
    project: Project,
    faults: Sequence[Fault],
    hosts: Hosts,
    plan: Plan,
    progress: Progress,
    *,
    others: Sequence[Case] = (),
    executor: Executor | None = None,
) -> MutationMatrix:
    """Run every fault in each of its host cases; these and the `others` clean, the latter as recorded without a fix.

    Ctrl-C keeps finished runs. `executor`: one that is open already and stays open, on the nodes of the plan.
    """
    started_s = time.monotonic()
    hosting = [case for fault in faults for case in hosts[fault.name]]
    used = tuple({case_id(case): case for case in (*hosting, *others)}.values())
    plan = plan.common(used).serving(used)
    check_fits(used, plan)
    as_recorded = set(map(case_id, others))
    clean = [_Planting(case=case, mended=case_id(case) not in as_recorded) for case in used]
    plantings = (*clean, *(_Planting(case=case, fault=fault) for fault in faults for case in hosts[fault.name]))
    progress.begin(len(plantings))
    opening = nullcontext(executor.with_plan(plan)) if executor else open_executor(plan, project, note=progress.note)
    with opening as opened:
        work = _TrialWork(project, used, plan, opened, progress)
        ended = run_schedule(
            plantings,
            work.run,
            opened.stop,
            jobs=plan.jobs,
            started=lambda planting: progress.started(planting.name, planting.world_size),
            finished=work.tell,
        )
    tried = [outcome for outcome in ended.results if outcome is not None]
    without = {outcome.result.case_id: outcome for outcome in tried if outcome.fault is None}
    targets = {case.target for case in used}
    return MutationMatrix(
        trials=tuple(
            _trial(outcome, without.get(outcome.result.case_id)) for outcome in tried if outcome.fault is not None
        ),
        clean=tuple(_trial(outcome, None) for outcome in without.values()),
        not_planted={
            fault.name: NEEDS["any" if any(map(fault.fits, targets)) else fault.model]
            for fault in faults
            if not hosts[fault.name]
        },
        wall_s=time.monotonic() - started_s,
        interrupted=ended.interrupted,
    )


class _Planting(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    fault: Fault | None = None
    mended: bool = True  # it runs with the candidate fixes without which no step ends

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def name(self) -> str:
        return f"{self.fault.name if self.fault is not None else 'clean'} in {case_id(self.case)}"


class _PlantingResult(msgspec.Struct, frozen=True, kw_only=True):
    planting: _Planting
    result: CaseResult
    baseline: BaselineDetection
    reached: "Mapping[bool, FaultEffect]"  # by whether the run had the candidate fixes of a recorded fault

    @property
    def fault(self) -> Fault | None:
        return self.planting.fault


class _TrialWork:
    """Runs injections on one engine. The references are run once, without faults."""

    def __init__(
        self, project: Project, cases: Sequence[Case], plan: Plan, executor: Executor, progress: Progress
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._progress = progress
        self._judge = prepare_judge(project, cases, plan)
        self._goldens: dict[str, Golden] = {}
        for case in cases:
            with suppress(Missing):
                self._goldens[case_id(case)] = find_golden(project.root, plan.hardware, family_id(case))
        self._references = open_references(project, plan, executor)

    def run(self, planting: _Planting) -> _PlantingResult | None:
        injections = () if planting.fault is None else (parse_injection(planting.fault.injection),)
        plan = msgspec.structs.replace(self._plan, injections=injections)
        baseline, reached = UNFINISHED, dict[bool, FaultEffect]()

        def review(judged: Judged) -> Judgement:
            nonlocal baseline
            reached[bool(judged.fixes)] = fault_effect(judged.run)
            if judged.run.complete:
                solo = finished(judged.references.get(solo_reference(judged.case)))
                baseline = baseline_detection(judged.run, self._goldens.get(case_id(judged.case)), solo)
            return judged.judgement

        runner = CaseRunner(plan, self._executor.with_plan(plan), self._judge, self._references, review)
        fixes = self._judge.needed_fixes(planting.case) if planting.mended else ()
        result = runner.run(planting.case, fixes)
        if result is None:
            return None
        return _PlantingResult(planting=planting, result=result, baseline=baseline, reached=reached)

    def tell(self, tried: _PlantingResult) -> bool:
        """Say which checks detect it, in its own line where a clean run fails or a fault is not detected."""
        result = tried.result
        expected = result.verdict.good == (tried.fault is None or tried.fault.equivalent is not None)
        checks = ", ".join(sorted(_checks(result))) or "no finding"
        line = f"{result.verdict.value:<15} {result.seconds:7.1f} s  {tried.planting.name}: {checks}"
        self._progress.finished(tried.planting.name, line, remarkable=not expected)
        return False


def baseline_detection(run: Run, golden: Golden | None, solo: Run | None) -> BaselineDetection:
    """What comparing losses with the golden, and the SQNR of gradients against `solo`, detect in a finished run."""
    losses = [[step.loss for step in trace.steps] for trace in run.traces]
    gaps = [
        abs(loss - expected) if math.isfinite(loss) else math.inf
        for curve in losses
        for loss, expected in zip(curve, golden.losses if golden is not None else curve, strict=False)
    ]
    sqnr_db = None if solo is None else _worst_sqnr(run, solo)
    return BaselineDetection(loss_gap=max(gaps, default=math.inf), sqnr_db=sqnr_db)


def _worst_sqnr(run: Run, solo: Run) -> float | None:
    """SQNR in dB of the worst gradient of the first step: infinite if all are equal, minus infinity for NaN."""
    found, expected = assemble(run.traces), assemble(solo.traces)
    keys = [key for key in expected if key.step == 1 and key.kind == "grad" and key in found]
    distances = [relative_distance(found[key], expected[key]) for key in keys]
    if not distances:
        return None
    worst = max(map(nan_as_inf, distances))
    return math.inf if worst == 0 else -20 * math.log10(worst)


def _checks(result: CaseResult) -> frozenset[str]:
    return frozenset(finding.check for finding in result.findings)


def _trial(tried: _PlantingResult, clean: _PlantingResult | None) -> Trial:
    """Return the trial, without the checks that fail in the clean run of the case too.

    What a record explains in a clean run is not ignored: it has limits.
    """
    fault, result = tried.fault, tried.result
    ignored = _checks(clean.result) if clean is not None and not clean.result.verdict.good else frozenset()
    findings = [finding for finding in result.findings if finding.check not in ignored]
    steps = [finding.step for finding in findings if finding.step is not None]
    excesses = [finding.excess for finding in findings if finding.excess is not None]
    return Trial(
        fault=fault.name if fault is not None else None,
        group=fault.group if fault is not None else None,
        equivalent=fault is not None and fault.equivalent is not None,
        case_id=result.case_id,
        verdict=result.verdict,
        rules=tuple(sorted({finding.rule for finding in findings})),
        first_step=min(steps, default=None),
        excess=max(excesses, key=nan_as_inf, default=None),
        message=findings[0].first_line if findings else "",
        misnamed=_misnamed(tried.planting, findings),
        baseline=tried.baseline,
        parity=result.measured.parity if result.measured is not None else None,
        not_reached=_not_reached(tried, clean),
    )


def _misnamed(planting: _Planting, findings: Sequence[Finding]) -> tuple[str, ...] | None:
    """Return what the headline misnames, or None. The list has the modules of the reference target."""
    fault, case = planting.fault, planting.case
    if fault is None or fault.equivalent is not None or not findings:
        return None
    return fault.misnamed(findings[0], case.world_size, by_fqn=case.target == REFERENCE)


def _not_reached(tried: _PlantingResult, clean: _PlantingResult | None) -> str:
    """Why a planting says nothing about the checks; empty if it does, and for a fault that must have no effect."""
    broken = next((reached.broken for reached in tried.reached.values() if reached.broken), "")
    if broken or clean is None or tried.fault is None or tried.fault.equivalent is not None:
        return broken
    if tried.reached != clean.reached:
        return ""
    return f"without it, the case {clean.result.verdict.phrase} too" if clean.baseline == UNFINISHED else NO_EFFECT


def recorded_kills(matrix: MutationMatrix, before: Kills | None = None) -> Kills:
    """What this matrix found; of faults that it does not plant what was recorded `before`, with the same software."""
    kills: dict[str, dict[str, Kill]] = {}
    for trial in matrix.trials:
        if trial.fault is not None:
            kill = Kill(verdict=trial.verdict, rules=trial.rules, misnamed=trial.misnamed)
            kills.setdefault(trial.fault, {})[trial.case_id] = kill
    installed = installed_versions(("torch", "torchao"))
    software = {name: version for name, version in installed.items() if version is not None}
    kept = before.found if before is not None and before.software == software else {}
    both = {**kept, **kills}
    return Kills(found={name: both[name] for name in all_faults() if name in both}, software=software)


class FaultEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes a run with an injected fault from the clean run."""

    digest: str  # of everything that the ranks recorded, except time and memory of the process
    broken: str = ""  # what the code of the fault itself raised


def fault_effect(run: Run) -> FaultEffect:
    """Return the digest of all records of a run, and the error of the injected fault's own code, if any."""
    state = hashlib.sha256()
    for trace in run.traces if run.complete else ():
        steps = tuple(msgspec.structs.replace(step, seconds=0.0) for step in trace.steps)
        traffic = tuple(msgspec.structs.replace(record, starts=()) for record in trace.traffic or ())
        timeless = msgspec.structs.replace(trace, steps=steps, traffic=traffic, peak_memory_bytes=0)
        state.update(msgspec.msgpack.encode(timeless))
    for message in sorted({failure.message for failure in run.causes}):
        state.update(message.encode())
    return FaultEffect(digest=state.hexdigest(), broken=next(filter(None, map(_raised_by_fault, run.causes)), ""))


def _raised_by_fault(failure: RankFailure) -> str:
    """The error, if an exception of the traceback comes from the code of a fault; what that calls is not its code."""
    if failure.phase.startswith("injection "):
        return failure.message
    for exception in failure.traceback.split("Traceback (most recent call last):")[1:]:
        frames = [line for line in exception.splitlines() if line.startswith('  File "')]
        if frames and _FAULTS in frames[-1]:
            return next(line for line in exception.splitlines() if line and not line.startswith(" "))
    return ""
