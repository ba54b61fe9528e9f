"""The check of a target: does a user's own training code work under the harness, and what can be checked of it?

Runs a few tiny cases: on one rank and in every layout, in BF16 and in FP8, in float64 for sharp comparisons and in
bfloat16 as users run it, each also without probes. What is wrong is found by the checks of any run and by the three
questions here: do probes change a bit, do ranks start from different weights, is the loss a mean over tokens. One step
each has two microbatches, clipping and unequal labels (`studies/one_step.py`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from harness.checks.assembly import explain_scale
from harness.checks.check import Rule, Stage
from harness.checks.failures import refusal_words
from harness.checks.judge import Judgement
from harness.checks.model import unequal_initial_weights
from harness.errors import HarnessError
from harness.evidence.references import Reference
from harness.matrix.case import Case, Dtype, Float8, Layout, Train
from harness.matrix.caseid import case_id, layout_id, parse_layout
from harness.matrix.recipes import Recipe
from harness.matrix.rules import exclusions
from harness.project import Project
from harness.request import RunRequest
from harness.result import CaseResult
from harness.running.case_judge import prepare_judge
from harness.running.case_runner import Judged
from harness.running.identity import check_targets, target_file
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.references import ReferenceRunner
from harness.studies.one_step import OneStep, judged_one_step, one_step_cases
from harness.trace import RankTrace, Run
from harness.trace.model import ModelRecord, StateChange
from harness.verdict import Finding, NotJudged, Verdict
from harness.workflow import check_fits, run_cases

DEFAULT_RECIPE: Recipe = "tensorwise"
DEFAULT_LAYOUTS = ("fsdp2", "tp2", "hsdp2x2")
TIMEOUT_S = 60.0  # of one tiny case; the slowest takes below 10 s on two busy cores

_SAYS = "{} in losses or gradient norms from step {{step}} on"
RANDOM = Rule(
    name="target/random",
    says=_SAYS.format("two equal runs differ"),
    stage=Stage.RUN,
    fix="seed every source of randomness in build() by case.train.seed (torch.manual_seed), switch dropout off, and "
    "use no time, process id or unordered set.",
)
NOT_NEUTRAL = Rule(
    name="target/probes",
    says=_SAYS.format("a run with probes differs from one without"),
    stage=Stage.RUN,
    fix="find what depends on hooks or on who calls a module: patches of torch or torchao by the target, "
    "`torch.nn.Module.__call__` replaced, or losses read before they are complete.",
)
SCALE = Rule(name="target/loss-scale", says="{explanation}", stage=Stage.RUN)


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `check-target`. `base`: a case to take model, training and options from."""

    target: str
    recipe: Recipe | None = None
    layouts: tuple[Layout, ...] = ()
    base: Case | None = None


class TargetRun(msgspec.Struct, frozen=True, kw_only=True):
    """One case as it was run. `refused`: the words in which the target says that it does not support the layout."""

    case_id: str
    layout: str
    recipe: str
    dtype: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    not_judged: tuple[NotJudged, ...]
    refused: str | None
    probes_neutral: bool | None  # None: not compared
    command: str
    seconds: float
    one_step: bool = False  # it only shows what training loops get wrong


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness found in a layout. `on_axes`: parameters by the mesh axes that they are distributed over."""

    layout: str
    linears: int
    converted: int
    checkpointed: int
    compiled: int
    parameters: int
    elements: int
    buffers: int
    on_axes: dict[str, int]


class TargetReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    target: str
    file: str
    runs: tuple[TargetRun, ...]
    built: tuple[Built, ...]
    notes: tuple[str, ...]
    software: dict[str, str]
    interrupted: bool
    seconds: float

    @property
    def nothing_ran(self) -> bool:
        """Return True if the target refused every layout, so that nothing was checked."""
        return not self.interrupted and all(run.refused is not None for run in self.runs)

    @property
    def _unsound(self) -> list[TargetRun]:
        return [run for run in self.runs if run.refused is None and run.findings]

    @property
    def good(self) -> bool:
        return not self._unsound and not self.interrupted and not self.nothing_ran

    @property
    def only_machine_failed(self) -> bool:
        """Return True if only the machine failed, which says nothing about the target."""
        return bool(self._unsound) and all(run.verdict is Verdict.INFRA for run in self._unsound)


def cases_of(options: CheckOptions, *, device: str) -> tuple[Case, ...]:
    """Return the cases that are run, each once; those that a rule excludes only where their layout was asked for.

    Raises HarnessError for a layout that was asked for and that no case may have.
    """
    base = options.base or Case(train=Train(lr=4e-3))
    recipe = options.recipe or (base.float8.recipe if base.float8.enabled else DEFAULT_RECIPE)
    usual = (base.layout,) if options.base is not None else tuple(map(parse_layout, DEFAULT_LAYOUTS))
    layouts = options.layouts or usual
    sharp: Dtype = "float64" if device == "cpu" else "float32"
    float8 = replace(base.float8, recipe=recipe)
    plan: list[tuple[Layout, Float8, Dtype]] = [(Layout(), Float8(), "bfloat16"), (Layout(), float8, sharp)]
    first = next((layout for layout in layouts if layout.world_size > 1), None)
    plan += [] if first is None else [(first, Float8(), "bfloat16")]
    plan += [(layout, float8, sharp) for layout in layouts]
    plan += [] if first is None else [(first, float8, "bfloat16")]
    cases = [
        replace(base, target=options.target, layout=layout, float8=conversion, train=replace(base.train, dtype=dtype))
        for layout, conversion, dtype in dict.fromkeys(plan)
    ]
    for case in cases:
        for rule in exclusions(case):
            what = f"rule {rule.name} excludes {case_id(case)}: {rule.reason}"
            raise HarnessError(what, where=f"target {options.target}", fix="give another --layout or case.")
    return tuple({case_id(case): case for case in cases}.values())


def cases_there(options: CheckOptions, plan: Plan) -> tuple[tuple[Case, ...], Plan]:
    """Return the cases that are run on the device of a plan, and the plan on one device that can run all of them."""
    cases = cases_of(options, device=plan.device)
    plan = plan.common(cases)
    return cases if plan.device == "cuda" else cases_of(options, device="cpu"), plan


def check_target(project: Project, options: CheckOptions, plan: Plan, progress: Progress) -> TargetReport:
    """Run the cases and gather what they say. Raises HarnessError if the module is not there."""
    check_targets([options.target], project.root)
    cases, plan = cases_there(options, plan)
    layouts = [case.layout for case in cases]
    more = one_step_cases(cases[0], layouts, "float32" if plan.device == "cuda" else "float64")
    cases = (*cases, *(case for name, (_, case) in more.items() if name not in map(case_id, cases)))
    check_fits(cases, plan)
    seen: dict[str, _Seen] = {}

    def review(judged: Judged) -> Judgement:
        if judged.run.complete and case_id(judged.case) not in more:
            seen[case_id(judged.case)] = _look(judged)
        return judged.judgement

    plan = replace(plan, timeout_s=plan.timeout_s or TIMEOUT_S, digests_built=True)
    result = run_cases(project, cases, plan, prepare_judge(project, cases, plan), progress, review=review)
    one_step = judged_one_step(more, result.results)
    runs = tuple(
        _target_run(case, case_result, seen.get(case_result.case_id), one_step.get(case_result.case_id))
        for case, case_result in zip(cases, result.results, strict=True)
    )
    return TargetReport(
        schema=1,
        target=options.target,
        file=target_file(options.target, project.root),
        runs=_without_unsupported(runs, [case_result.run for case_result in result.results]),
        built=_built(cases, seen),
        notes=_notes(result.results),
        software=result.end.provenance,
        interrupted=result.end.interrupted,
        seconds=result.end.wall_s,
    )


class _Seen(NamedTuple):
    findings: tuple[Finding, ...]
    probes_neutral: bool | None
    model: ModelRecord | None  # of rank 0


def _look(judged: Judged) -> _Seen:
    """Return what the questions of this study find in a complete run."""
    changed = _changed_by_probes(judged.case, judged.run, judged.references)
    return _Seen(
        findings=(*(changed or ()), *unequal_initial_weights(judged.run), *_scale(judged.case, judged.run)),
        probes_neutral=None if changed is None else not changed,
        model=judged.run.traces[0].model,
    )


def _changed_by_probes(case: Case, run: Run, references: ReferenceRunner) -> list[Finding] | None:
    """Return a finding when the run without probes has other numbers; None when it did not finish."""
    again = references.get(_unprobed(case))
    if again is None or not again.complete:
        return None
    step = _first_difference(run, again)
    if step is None:
        return []
    third = references.get(_unprobed(case))
    random = third is not None and third.complete and _first_difference(again, third) is not None
    return [(RANDOM if random else NOT_NEUTRAL).finding(step=step, expected="the same numbers, bit for bit")]


def _unprobed(case: Case) -> Reference:
    """Return the case without probes, for what probes change."""
    name, request = f"unprobed {case_id(case)}", RunRequest(case=case)
    return Reference(role="unprobed", name=name, case=case, request=request, kept=False)


def _first_difference(one: Run, other: Run) -> int | None:
    """Return the first step whose loss or gradient norm is not bitwise the same on every rank, or None."""
    pairs = zip(_numbers(one), _numbers(other), strict=False)
    return next((mine[0] for mine, theirs in pairs if mine != theirs), None)


def _numbers(run: Run) -> list[tuple[int, int, str, str]]:
    rows = [(step.step, trace.rank, step.loss, step.grad_norm) for trace in run.traces for step in trace.steps]
    return sorted((step, rank, loss.hex(), norm.hex()) for step, rank, loss, norm in rows)


def _scale(case: Case, run: Run) -> list[Finding]:
    """A finding when the first loss of one rank looks like a sum over tokens: then every reference has the same."""
    if case.world_size > 1 or case.float8.enabled or not run.traces[0].steps:
        return []
    explained = explain_scale(case, run.traces[0].steps[0].loss)
    return [SCALE.finding(explanation=explained.what, step=1, fix=explained.fix or None)] if explained else []


def _target_run(case: Case, result: CaseResult, seen: _Seen | None, one_step: OneStep | None) -> TargetRun:
    result = result if one_step is None else one_step.result
    return TargetRun(
        case_id=result.case_id,
        layout=layout_id(case.layout) if one_step is None else one_step.label,
        recipe=case.float8.recipe,
        dtype=case.train.dtype,
        verdict=result.verdict,
        findings=(*result.findings, *(seen.findings if seen is not None else ())),
        checks=result.checks,
        not_judged=result.not_judged,
        refused=None if one_step is None else one_step.refused,
        probes_neutral=None if seen is None else seen.probes_neutral,
        command=result.command,
        seconds=result.seconds,
        one_step=one_step is not None,
    )


def _without_unsupported(runs: tuple[TargetRun, ...], recorded: Sequence[Run | None]) -> tuple[TargetRun, ...]:
    """Return the runs, with those that the target refused by itself marked.

    By `NotImplementedError`, which says that it has no such case, or by another error where it works on one rank.
    """
    works = any(run.layout == "single" and run.verdict is not Verdict.CRASH for run in runs)
    words = [None if run is None else refusal_words(run.failures, any_error=works) for run in recorded]
    return tuple(replace(run, refused=run.refused or said) for run, said in zip(runs, words, strict=True))


def _built(cases: Sequence[Case], seen: Mapping[str, _Seen]) -> tuple[Built, ...]:
    """Return what was found in every layout with FP8."""
    built: dict[str, Built] = {}
    for case in cases:
        looked = seen.get(case_id(case))
        if case.float8.enabled and looked is not None and looked.model is not None:
            built.setdefault(layout_id(case.layout), _facts(layout_id(case.layout), looked.model))
    return tuple(built.values())


def _facts(layout: str, model: ModelRecord) -> Built:
    axes = ([axis for axis in parameter.axes if axis != "self"] for parameter in model.parameters)
    return Built(
        layout=layout,
        linears=len(model.linears),
        converted=sum(linear.converted for linear in model.linears),
        checkpointed=len(model.checkpointed),
        compiled=len(model.compiled),
        parameters=len(model.parameters),
        elements=sum(math.prod(parameter.shape) for parameter in model.parameters),
        buffers=len(model.buffers),
        on_axes=Counter(" and ".join(parameter_axes) or "none" for parameter_axes in axes),
    )


def _notes(results: Iterable[CaseResult]) -> tuple[str, ...]:
    """Return the torch settings that a target changes without an effect on the numbers of this run."""
    traces: list[RankTrace] = [trace for result in results if result.run is not None for trace in result.run.traces]
    changes: dict[StateChange, None] = {change: None for trace in traces for change in trace.state}
    harmless = {change.name: change for change in changes if change.name in ("deterministic algorithms", "threads")}
    return tuple(
        f"the target leaves torch's {name} at {change.after} instead of {change.before} after {change.phase}"
        for name, change in harmless.items()
    )
