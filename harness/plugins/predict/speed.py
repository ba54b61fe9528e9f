"""Speed: a case and its BF16 twin in turns, and how much faster it is, with an interval.

Every pair is two jobs on fresh ranks, one right after the other; which is first alternates, so that a drift of the
machine cancels out. A job is timed by the median of its steps after the warm-up, each on its slowest rank. No probe is
installed. A step includes the norm of all gradients, which the harness takes as trainers that clip do.
"""

import math
import time
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, stdev

import msgspec
from msgspec.structs import replace

from harness.checks.check import Witnesses
from harness.checks.measuring import measured
from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id
from harness.matrix.rules import expected_refusal
from harness.plugins.predict.cost import tokens_per_device
from harness.project import Project
from harness.result import CaseResult, Measured, RunEnd, RunResult, Speedup
from harness.running.case_runner import CaseRunner
from harness.running.conditions import Conditions, ConditionsMonitor
from harness.running.executor import open_executor
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.witnesses import open_witnesses
from harness.store import RunStore
from harness.studies.records import SanityJudge
from harness.workflow import check_fits, provenance, run_start

FEWEST_PAIRS = 3  # the interval of two ratios is as wide as anything
CONFIDENCE = 0.95
METHOD = "95 % interval by Student's t on the logarithms of paired ratios"


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One pair: the median seconds of a step of both jobs, and what the machine was like meanwhile."""

    twin_s: float
    case_s: float
    conditions: Conditions


class CaseSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `speedup` is None where a job failed, `failed` then its result."""

    case_id: str
    twin_id: str
    device: str = ""
    pairs: tuple[Timed, ...] = ()
    speedup: Speedup | None = None
    failed: CaseResult | None = None


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict measure` answers. `gated`: False on a CPU, whose seconds say nothing of float8."""

    schema: int = 1
    gated: bool
    method: str = METHOD
    warmup: int  # steps of every job that are not timed
    cases: tuple[CaseSpeed, ...]


def timed_case(case: Case, *, warmup: int, steps: int) -> Case:
    """The case with so many steps. Raises `HarnessError` for one that has no twin, or that does not train through."""
    where = case_id(case)
    if not case.float8.enabled:
        raise HarnessError("the case converts nothing.", where=where, fix="give a case with FP8; its twin is BF16.")
    refusal = expected_refusal(case)
    if refusal is not None:
        raise HarnessError(f"torch refuses this case: {refusal.reason}.", where=where)
    if case.train.resume != "none":
        raise HarnessError("a run that is resumed has other steps.", where=where, fix="give it without resuming.")
    return replace(case, train=replace(case.train, steps=warmup + steps))


def measure_speed(
    project: Project, cases: Sequence[Case], plan: Plan, progress: Progress, *, pairs: int, warmup: int
) -> tuple[tuple[CaseSpeed, ...], RunResult]:
    """The speed of every case, up to its first job that is not good, and all results, which are stored as a run."""
    plan = replace(plan.serving(cases), probed=False)
    check_fits(cases, plan)
    twins = [replace(case, float8=Float8()) for case in cases]
    store = RunStore(project.new_run())
    ids = tuple(case_id(member) for pair in zip(cases, twins, strict=True) for member in pair)
    start = run_start(project, plan, ids)
    started_s = time.monotonic()
    progress.begin(2 * pairs * len(cases))
    speeds: list[CaseSpeed] = []
    results: list[CaseResult] = []
    with store.locked(), open_executor(plan, project, progress.note) as executor:
        store.begin(start)
        cache = open_witnesses(project, plan, executor)
        runner = CaseRunner(plan, executor, SanityJudge(), cache, progress.note)
        for case, twin in zip(cases, twins, strict=True):
            speed, ended = _timed(case, twin, runner, plan, progress, pairs=pairs, warmup=warmup)
            speeds.append(speed)
            results += ended
            for result in ended:
                store.append(result)
        end = RunEnd(wall_s=time.monotonic() - started_s, provenance=provenance(results, plan))
        whole = RunResult(results=tuple(results), start=start, end=end)
        store.finish(whole)
    return tuple(speeds), whole


def _timed(  # noqa: PLR0913  what the jobs need, and how many there are
    case: Case, twin: Case, runner: CaseRunner, plan: Plan, progress: Progress, *, pairs: int, warmup: int
) -> tuple[CaseSpeed, tuple[CaseResult, ...]]:
    speed = CaseSpeed(case_id=case_id(case), twin_id=case_id(twin))
    last: dict[str, CaseResult] = {}
    seconds: list[Timed] = []
    for number in range(pairs):
        with ConditionsMonitor(plan.device) as watch:
            for member in (twin, case) if number % 2 == 0 else (case, twin):
                name = case_id(member)
                progress.started(name, member.world_size)
                result = last[name] = runner.run(member) or runner.not_run(member)
                line = f"{result.verdict.value:<15} {result.seconds:7.1f} s  {name}"
                progress.finished(name, line, remarkable=not result.verdict.good)
                if not result.verdict.good:
                    return replace(speed, pairs=tuple(seconds), failed=result), tuple(last.values())
        twin_s, case_s = (median(_numbers(member, last[case_id(member)]).step_s[warmup:]) for member in (twin, case))
        seconds.append(Timed(twin_s=twin_s, case_s=case_s, conditions=watch.seen))
    measured_speedup = speedup(case, twin, seconds)
    for member, own in ((case, measured_speedup), (twin, None)):
        result = last[case_id(member)]
        last[case_id(member)] = replace(result, measured=replace(_numbers(member, result), speedup=own))
    device = result.run.traces[0].device if result.run is not None else ""
    return replace(speed, device=device, pairs=tuple(seconds), speedup=measured_speedup), tuple(last.values())


def _numbers(case: Case, result: CaseResult) -> Measured:
    assert result.run is not None, "a case that passed has a run"
    numbers = measured(case, result.run, Witnesses(expect=Expectations(case)))
    assert numbers is not None, "a case that passed has numbers"
    return numbers


def speedup(case: Case, twin: Case, pairs: Sequence[Timed]) -> Speedup:
    """Return how much faster the case is than its twin: the mean of the logarithms of the ratios, with its interval."""
    ratio, low, high = interval([pair.twin_s / pair.case_s for pair in pairs])
    return Speedup(
        twin=case_id(twin),
        pairs=len(pairs),
        ratio=ratio,
        low=low,
        high=high,
        tokens_per_s=tokens_per_device(case, median(pair.case_s for pair in pairs)),
        twin_tokens_per_s=tokens_per_device(twin, median(pair.twin_s for pair in pairs)),
    )


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios and its 95 % interval, by Student's t on their logarithms."""
    assert len(ratios) >= FEWEST_PAIRS, "two ratios have no useful interval"
    logarithms = [math.log(ratio) for ratio in ratios]
    middle = fmean(logarithms)
    half = t_quantile(len(ratios) - 1) * stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def t_quantile(degrees: int) -> float:
    """The quantile of Student's t that 95 % lie within on both sides: the expansion 26.7.5 of Abramowitz and Stegun.

    Within 1 % of the exact value from 2 degrees of freedom on.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(degrees) ** power for power, term in enumerate(terms, 1))
