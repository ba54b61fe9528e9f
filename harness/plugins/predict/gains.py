"""What FP8 gains: by prediction with its recipes, parts of a step and linears; and as measured, with an interval.

Measured, a case and its BF16 counterpart run in turns. Every pair is two jobs on fresh ranks, one right after the
other; which is first alternates, so that a drift of the machine cancels out. A job is timed by the median of its steps
after the warm-up, each on its slowest rank. No probe is installed. A step includes the norm of all gradients, which the
harness takes as trainers that clip do.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import NormalDist, fmean, median, stdev

import msgspec
from msgspec.structs import replace

from harness.checks.check import Witnesses
from harness.checks.measuring import measured
from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.work import Gemm, gemms
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN, is_converted, linear_features, linear_name
from harness.matrix.recipes import MatmulRole, Recipe, mx_recipe
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.predict.conditions import Conditions, ConditionsMonitor
from harness.plugins.predict.cost import tokens_per_device
from harness.plugins.predict.machine import Machine, Peak, require_formulas, require_multiplies
from harness.plugins.predict.roofline import Step, cast_s, casts, gemm_s, once_s, predicted_step, speed_up
from harness.project import Project
from harness.result import CaseResult, Measured, RunEnd, RunResult, Speedup
from harness.running.case_runner import CaseRunner
from harness.running.executor import open_executor
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.references import open_references
from harness.store import RunStore
from harness.studies.records import SanityJudge
from harness.workflow import check_fits, provenance, run_start

# How far predictions were from what was published (`tests/plugins/predict/unit/test_roofline.py`).
ERROR_H100, ERROR_ELSEWHERE = 0.06, 0.16


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train in FP8: how many times as fast as in BF16, or the rule that refuses it, with its reason."""

    name: str
    compiled: float | None = None
    eager: float | None = None
    tokens_s: float | None = None  # of a device, compiled
    refused: str = ""
    reason: str = ""
    fault: str = ""  # on record, that such training runs into

    @property
    def ratio(self) -> float:
        """Compiled; 0 where it is refused."""
        return self.compiled or 0.0


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul of a linear on one rank: its shape after sharding, and the time of one execution in microseconds."""

    role: MatmulRole
    m: int
    n: int
    k: int
    aligned: bool
    refused: bool  # by `torch._scaled_mm`, padded as it is
    bf16_us: float
    float8_us: float


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One linear of all blocks, or the output layer, in BF16 and in float8: milliseconds of one rank and step.

    `gain`: how many times as fast as in BF16 it is in float8, casts and padding included. `refused`: one of its float8
    matmuls is.
    """

    name: str
    count: int
    converted: bool
    refused: bool
    gain: float
    bf16_ms: float
    float8_ms: float
    cast_ms: float
    padding_ms: float
    matmuls: tuple[Matmul, ...]


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """Everything predicted for a case on a machine. Times are predicted, shapes and bytes are exact."""

    case: str
    device: str
    recipe: Recipe
    tokens_s: float  # of a device in BF16
    bf16: Step
    float8: Step
    bf16_step_s: float
    float8_step_s: float
    variants: tuple[Variant, ...]
    linears: tuple[Conversion, ...]
    assumptions: tuple[str, ...]


def predicted_gains(case: Case, machine: Machine, *, eager: bool = False, known: Sequence[KnownFault] = ()) -> Gains:
    """The prediction for a case in bfloat16 with compiled blocks; without a recipe for the fastest that has no fault.

    `known`: recorded faults. Raises `HarnessError` for a target whose model is not known, and for MXFP8 on a machine
    that does not multiply it.
    """
    require_formulas(case)
    if case.model.experts:
        what = "which grouped matmuls gain from FP8 was not measured."
        raise HarnessError(what, where=case_id(case), fix="ask for a dense model, or for `predict layouts`.")
    require_multiplies(machine, case)
    case = replace(case, train=replace(case.train, dtype="bfloat16"))
    case = case if eager else compiled(case)
    candidates = variants(case, machine.peak)
    predictions = tuple(costed(name, of, matching(known, of), machine) for name, of in candidates.items())
    best = max(predictions, key=lambda variant: (not variant.fault, variant.ratio))
    case = case if case.float8.enabled else candidates[best.name]
    twin = replace(case, float8=Float8())
    steps = predicted_step(twin, machine), predicted_step(case, machine)
    return Gains(
        case=case_id(case),
        device=machine.peak.name,
        recipe=case.float8.recipe,
        tokens_s=tokens_per_device(twin, steps[0].total_s),
        bf16=steps[0],
        float8=steps[1],
        bf16_step_s=steps[0].total_s,
        float8_step_s=steps[1].total_s,
        variants=predictions,
        linears=conversions(case, machine),
        assumptions=tuple(_assumptions(machine)),
    )


def variants(case: Case, device: Peak) -> dict[str, Case]:
    """The case with every recipe of the device, by name: as torchtitan uses them, and with what makes them faster."""
    base = replace(case.float8, casts=(), fp8_all_gather=False, precompute_scale=False, tp_styles="plain")
    tensorwise = replace(base, recipe="tensorwise", tp_styles="float8" if case.layout.tp > 1 else "plain")
    rowwise = replace(base, recipe="rowwise")
    settings = {"tensorwise": tensorwise}
    if case.layout.dp_shard > 1:
        settings["tensorwise, float8 all-gather"] = replace(tensorwise, fp8_all_gather=True, precompute_scale=True)
    settings["rowwise"] = rowwise
    small = too_small_for_rowwise(case)
    if 0 < len(small) < len(BLOCK_LINEARS):
        names = ", ".join(name.rpartition(".")[2] for name in small)
        settings[f"rowwise, {names} in BF16"] = replace(rowwise, filter_fqns=(*rowwise.filter_fqns, *small))
    settings["rowwise_with_gw_hp"] = replace(base, recipe="rowwise_with_gw_hp")
    for wgrad in (True, False) if device.mxfp8 else ():
        if recipe := mx_recipe(rounds_scales_down=False, wgrad=wgrad):
            settings[recipe] = replace(base, recipe=recipe, pad_inner_dim=False)
    return {name: replace(case, float8=float8) for name, float8 in settings.items()}


def too_small_for_rowwise(case: Case) -> tuple[str, ...]:
    """Linears of blocks that torchao's `_auto_filter_for_recipe` (0.18) does not convert with the recipe rowwise.

    By the size of the whole weight: linears are converted before they are sharded.
    """
    sizes = {name: linear_features(case, name) for name in BLOCK_LINEARS}
    return tuple(name for name, (k, n) in sizes.items() if n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


def costed(name: str, case: Case, faults: Sequence[KnownFault], machine: Machine) -> Variant:
    """Return the predicted gain of a way to train."""
    judged = replace(case, compile="none") if case.float8.traits.block else case  # no CPU generates its casts
    in_bf16 = exclusions(replace(judged, float8=Float8()))  # rules that are about the harness, not about FP8
    rule = next((rule for rule in exclusions(judged) if rule not in in_bf16), expected_refusal(case))
    if rule is not None:
        return Variant(name=name, refused=rule.name, reason=rule.reason)
    graphs, eager = compiled(case), replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    return Variant(
        name=name,
        compiled=speed_up(graphs, machine),
        eager=speed_up(eager, machine),
        tokens_s=tokens_per_device(graphs, predicted_step(graphs, machine).total_s),
        fault=faults[0].name if faults else "",
    )


def compiled(case: Case) -> Case:
    return case if case.compile != "none" else replace(case, compile="inductor")


def conversions(case: Case, machine: Machine) -> tuple[Conversion, ...]:
    """Return every linear in block order, then the output layer. An unconverted linear is costed as if converted."""
    converted = replace(case, float8=replace(case.float8, output_layer=True, filter_fqns=()))
    pairs: defaultdict[str, list[tuple[Gemm, Gemm]]] = defaultdict(list)
    for pair in zip(gemms(replace(case, float8=Float8())), gemms(converted), strict=True):
        pairs[linear_name(pair[0].fqn)].append(pair)
    cast_by_name: defaultdict[str, float] = defaultdict(float)
    for cast in casts(converted):
        cast_by_name[linear_name(cast.fqn)] += cast_s(cast, machine)
    names = (*BLOCK_LINEARS, OUTPUT_FQN)
    return tuple(_conversion(case, name, pairs[name], cast_by_name[name] * 1e3, machine) for name in names)


def _conversion(
    case: Case, name: str, pairs: Sequence[tuple[Gemm, Gemm]], cast_ms: float, machine: Machine
) -> Conversion:
    """`pairs`: its matmuls in BF16 and in float8."""
    fqn = pairs[0][0].fqn
    padding_ms = sum(scaled.padding_bytes for _, scaled in pairs) / machine.memory_bytes_s * 1e3
    bf16_ms = sum(gemm_s(plain, machine) for plain, _ in pairs) * 1e3
    float8_ms = sum(gemm_s(scaled, machine) for _, scaled in pairs) * 1e3
    matmuls = tuple(
        Matmul(
            role=scaled.role,
            m=scaled.m,
            n=scaled.n,
            k=scaled.k,
            aligned=scaled.aligned,
            refused=scaled.refused,
            bf16_us=once_s(plain, machine) * 1e6,
            float8_us=once_s(scaled, machine) * 1e6,
        )
        for plain, scaled in pairs
        if plain.fqn == fqn
    )
    return Conversion(
        name=name,
        count=len({plain.fqn for plain, _ in pairs}),
        converted=is_converted(case, fqn),
        refused=any(matmul.refused for matmul in matmuls),
        gain=bf16_ms / (float8_ms + cast_ms + padding_ms),
        bf16_ms=bf16_ms,
        float8_ms=float8_ms,
        cast_ms=cast_ms,
        padding_ms=padding_ms,
        matmuls=matmuls,
    )


def _assumptions(machine: Machine) -> Iterator[str]:
    peak = machine.peak
    h100 = peak.name == "h100"
    error, devices = (ERROR_H100, "Meta's H100, with 2.4 TB/s") if h100 else (ERROR_ELSEWHERE, "B200 and MI300X")
    yield (
        f"times are a model of {peak.name}: {peak.bfloat16:g} and {peak.float8:g} TFLOP/s, {peak.memory_tb_s:g} TB/s, "
        f"{machine.gpus_per_node} devices a node, {machine.network_gb_s:g} GB/s of network for each"
    )
    yield f"predicted speed-ups were within {error:.0%} of those published for {devices}"
    yield "blocks are compiled where not said otherwise; under TP tensorwise has float8 TP styles, others plain ones"
    yield "the host is modeled for eager blocks alone: compiled small models are slower than predicted"
    yield from machine.rates.words


FEWEST_PAIRS = 3  # the interval of two ratios is as wide as anything
CONFIDENCE = 0.95
METHOD = "95 % interval by Student's t on the logarithms of paired ratios"


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One pair: the median seconds of a step of both jobs, and what the machine was like meanwhile."""

    twin_s: float
    case_s: float
    conditions: Conditions


class CaseSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `speedup` is None if a job failed, `failed` then its result."""

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
    """Return the case with these steps. Raises `HarnessError` without a BF16 counterpart, or if it does not train."""
    where = case_id(case)
    if not case.float8.enabled:
        raise HarnessError(
            "the case converts nothing.", where=where, fix="give a case with FP8; its counterpart is BF16."
        )
    refusal = expected_refusal(case)
    if refusal is not None:
        raise HarnessError(f"torch rejects this case: {refusal.reason}.", where=where)
    if case.train.resume != "none":
        raise HarnessError("a run that is resumed has other steps.", where=where, fix="give it without resuming.")
    return replace(case, train=replace(case.train, steps=warmup + steps))


def measure_speed(
    project: Project, cases: Sequence[Case], plan: Plan, progress: Progress, *, pairs: int, warmup: int
) -> tuple[tuple[CaseSpeed, ...], RunResult]:
    """Return the speed of every case, up to its first failed job, and all results, which are stored as a run."""
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
        runner = CaseRunner(plan, executor, SanityJudge(), open_references(project, plan, executor))
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
    """Return how much faster the case is than its BF16 counterpart: the mean of the logarithms of the ratios, with its
    interval.
    """
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
    """Return the quantile of Student's t for a two-sided 95 % interval: expansion 26.7.5 of Abramowitz and Stegun.

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
