"""The noise: samples of how far correct FP8 and BF16 runs are from their golden, over seeds, layouts and machines."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from harness.checks.check import finished
from harness.checks.judge import Judgement
from harness.checks.parity import worst_distances
from harness.engine.hardware import arithmetic_limits
from harness.evidence import tolerance
from harness.evidence.golden import find_golden, hardware_classes
from harness.evidence.references import solo_reference
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id, family_id, layout_id, reference_case
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.project import Project
from harness.result import CaseResult
from harness.running.case_runner import Judged
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.studies.records import SanityJudge, needed_references
from harness.text import timestamp
from harness.trace import RankTrace
from harness.verdict import Verdict
from harness.workflow import run_cases


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of every check including the new samples, and the results of failed runs."""

    evidence: dict[str, tolerance.Evidence]
    new_samples: int
    failed: tuple[CaseResult, ...]
    interrupted: bool


def recorded_cases(cases: Iterable[Case], known: Sequence[KnownFault]) -> dict[str, tuple[KnownFault, ...]]:
    """By case id, the recorded faults of the cases that must not be measured: their distance is no noise."""
    faults_by_case = {case_id(case): matching(known, case) for case in cases if _is_measurable(case)}
    return {name: faults for name, faults in faults_by_case.items() if faults}


def measured_cases(cases: Iterable[Case], *, layouts: int, known: Sequence[KnownFault] = ()) -> tuple[Case, ...]:
    """Of these cases, up to `layouts` with different layouts for every tolerance key, spread over world sizes.

    Without those that must be refused, that have a tolerance of their own, or that a fault of `known` affects.
    """
    by_key: dict[str, dict[Layout, Case]] = {}
    for case in cases:
        if _is_measurable(case) and not matching(known, case):
            by_key.setdefault(tolerance.tolerance_key(case), {}).setdefault(case.layout, case)
    return tuple(case for by_layout in by_key.values() for case in _spread(list(by_layout.values()), layouts))


def _is_measurable(case: Case) -> bool:
    return expected_refusal(case) is None and case.checks.loss_tolerance is None


def over_seeds(cases: Iterable[Case], seeds: int) -> tuple[Case, ...]:
    """These cases with each of the seeds 0 to `seeds` - 1."""
    return tuple(replace(case, train=replace(case.train, seed=seed)) for seed in range(seeds) for case in cases)


def measure(
    project: Project, cases: Sequence[Case], plan: Plan, progress: Progress, *, command: str, fresh: bool
) -> Measurement:
    """Run the cases and return the evidence with their distances, which replace earlier ones of this environment.

    `fresh` measures against BF16 references that run now; otherwise against the stored goldens, which shows the spread
    over machines.
    """
    plan = plan.common(cases)
    references = needed_references(cases) if fresh else ()
    wanted = {case_id(case) for case in cases}
    distances: dict[str, tuple[float, ...]] = {}
    unique = tuple({case_id(case): case for case in (*references, *cases)}.values())
    review = partial(_keep_distances, wanted=wanted, kept=distances)
    result = run_cases(project, unique, plan, SanityJudge(), progress, review=review)
    passed = [of for of in result.results if of.verdict is Verdict.PASSED]
    traces = {of.case_id: of.run.traces[0] for of in passed if of.run is not None}
    trained = [(case, traces[case_id(case)]) for case in cases if case_id(case) in traces]
    pairs = ((case, trace, _reference_losses(project, case, traces, fresh=fresh)) for case, trace in trained)
    samples = [
        _sample(case, tolerance.tolerance_key(case), _distances(trace, losses))
        for case, trace, losses in pairs
        if losses is not None
    ]
    parity = [
        _sample(case, tolerance.parity_key(case, plan.numerics), distances[case_id(case)])
        for case, _ in trained
        if case_id(case) in distances and not shares_its_parity_key(case, plan.numerics)
    ]
    return Measurement(
        evidence={
            check: _merged(project, check, check_samples, list(traces.values()), command=command)
            for check, check_samples in ((tolerance.LOSS_VS_GOLDEN, samples), (tolerance.PARITY, parity))
            if check_samples
        },
        new_samples=len(samples) + len(parity),
        failed=tuple(of for of in result.results if of.verdict is not Verdict.PASSED),
        interrupted=result.end.interrupted,
    )


def _keep_distances(judged: Judged, wanted: Collection[str], kept: dict[str, tuple[float, ...]]) -> Judgement:
    """Keep how far the gradients of every step are from those of the single-rank reference, by case id."""
    case, run, name = judged.case, judged.run, case_id(judged.case)
    sketched = judged.judgement.verdict is Verdict.PASSED and all(trace.sketches for trace in run.traces)
    solo = finished(judged.references.get(solo_reference(case))) if sketched and name in wanted else None
    if solo is not None:
        kept[name] = worst_distances(run, solo, steps=range(1, case.train.steps + 1))
    return judged.judgement


def shares_its_parity_key(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True for another model than the default one under a key that holds for all models: it must not change the key."""
    return tolerance.parity_key(case, numerics) in tolerance.OF_EVERY_MODEL and case.model.shape != Case().model.shape


def environment() -> str:
    """Return the variables that limit the CPU kernels of this process (`ATEN_CPU_CAPABILITY=avx2`), or `default`."""
    return arithmetic_limits() or "default"


def _spread(cases: list[Case], count: int) -> list[Case]:
    """Up to `count` of the cases, evenly spread over world sizes."""
    ordered = sorted(cases, key=lambda case: (case.world_size, case_id(case)))
    if len(ordered) <= count:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(index * last / max(1, count - 1))] for index in range(count)]


def _reference_losses(
    project: Project, case: Case, traces: dict[str, RankTrace], *, fresh: bool
) -> tuple[float, ...] | None:
    """Return the losses that the case is measured against; None if its fresh reference failed."""
    if fresh:
        trace = traces.get(case_id(reference_case(case)))
        return None if trace is None else tuple(step.loss for step in trace.steps)
    trace = traces[case_id(case)]
    return find_golden(project.root, hardware_classes(trace.device, trace.architecture), family_id(case)).losses


def _distances(trace: RankTrace, losses: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(abs(step.loss - loss) for step, loss in zip(trace.steps, losses, strict=True))


def _sample(case: Case, key: str, per_step: tuple[float, ...]) -> tolerance.Sample:
    return tolerance.Sample(
        key=key,
        case_id=case_id(case),
        layout=layout_id(case.layout),
        seed=case.train.seed,
        per_step=per_step,
        environment=environment(),
    )


def _merged(
    project: Project, check: str, samples: Sequence[tolerance.Sample], traces: Sequence[RankTrace], *, command: str
) -> tolerance.Evidence:
    """Return the stored evidence, with these samples instead of earlier ones of the same cases and environment."""
    is_stored = tolerance.evidence_path(project.root, check).exists()
    stored = tolerance.read_evidence(project.root, check).samples if is_stored else ()
    replaced = {(sample.case_id, sample.environment) for sample in samples}
    kept = [sample for sample in stored if (sample.case_id, sample.environment) not in replaced]
    return tolerance.Evidence(
        samples=(*kept, *samples),
        software=dict(sorted(traces[0].software.items())) if traces else {},
        device=traces[0].device if traces else "",
        command=command,
        created=timestamp(),
    )
