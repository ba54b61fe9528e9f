"""Judges what ranks recorded of a script: with the checks of cases that need no reference, and by what no script means.

A rule that follows from the formula of a case is left out (`unmeant.toml`): a script never promised it.
"""

import fnmatch
import functools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from harness.checks.assembly import assemble, relative_distances
from harness.checks.catalogue import CHECKS, by_cause
from harness.checks.check import Check, Rules, Stage, Witnesses, merge_ranks
from harness.checks.judge import judge
from harness.checks.parity import replicas
from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.model import Model, found_model
from harness.matrix.case import Case, Checkpointing
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics
from harness.plugins.exec.expectations import Meant, differences, meant_by
from harness.plugins.exec.request import RECORDED, TARGET, ProcessRecord
from harness.text import format_ranks
from harness.trace import RankFailure, RankTrace, Run
from harness.verdict import Finding, NotJudged, Value

NO_OPTIMIZER = "no optimizer was built"
_MISSING = "a missing reference"  # what alone breaks a rule of a check that needs one

_rule = Rules("watch", Stage.MODEL)
OTHERWISE = _rule(
    "otherwise",
    "{name} of what is trained is {here} on {ranks}, and {there} on rank {first}",
    key=("name",),
    fix="convert, wrap and distribute the model alike on every rank.",
)
NO_NUMBER = _rule("loss", "the loss is {value} in step {step} on rank {rank}", stage=Stage.NO_NUMBER, numeric=True)
NOT_IN_MODEL = _rule(
    "not-in-model",
    "the optimizer steps, and has no parameter of a module that was called",
    fix="make the optimizer behind fully_shard(), parallelize_module() and to_empty(), which replace parameters.",
)
FLUSHED = _rule(
    "flushed",
    "{share:.3g} of the values of {operand} of {module} become zero in float8",
    stage=Stage.OPERAND,
    located=True,
    numeric=True,
)
OTHER_NUMBER = _rule("number", "{kind} of {module} is {distance:.2g} away from the first record's", numeric=True)
RULES = _rule.declared
_MOST_FLUSHED = 0.5  # a cast that loses half of what is not zero keeps no gradient


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, the checks that were executed, and what was not judged, with the reason."""

    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    case: Case | None = None


def judge_jobs(records: Sequence[ProcessRecord], meant: Meant | None = None) -> Judged:
    """Return what the processes of a command did wrong, of all its jobs; how they ended is said by others."""
    trained = [replace(record, ended="") for record in records if record.steps or record.not_watched]
    jobs: list[list[ProcessRecord]] = []
    for record in sorted(trained, key=lambda record: record.pid):
        free = (job for job in jobs if job[0].world_size == record.world_size)
        job = next((job for job in free if all(other.rank != record.rank for other in job)), None)
        jobs.append([record]) if job is None else job.append(record)
    judged = [judge_records(job, meant) for job in jobs]
    return Judged(
        findings=tuple(finding for of_job in judged for finding in of_job.findings),
        checks=tuple(dict.fromkeys(name for of_job in judged for name in of_job.checks)),
        not_judged=tuple(dict.fromkeys(reason for of_job in judged for reason in of_job.not_judged)),
    )


def checks_of_scripts() -> tuple[Check, ...]:
    """Return the checks that compare a run with no other one."""
    return tuple(check for check in CHECKS if not _needs_another_run(check))


def _needs_another_run(check: Check) -> bool:
    compares = check.needs_signature or check.needs_relation or check.judges_partner
    return compares or any(rule.only == _MISSING for rule in check.rules)


@functools.cache
def unmeant() -> Mapping[str, str]:
    """Return the rules that a script has not promised to keep, as patterns, each with the reason."""
    table = tomllib.loads((Path(__file__).parent / "unmeant.toml").read_text())
    return {rule: group["why"] for group in table["unmeant"] for rule in group["rules"]}


def judge_records(
    records: Sequence[ProcessRecord], meant: Meant | None = None, numerics: Numerics = VIRTUAL_DEVICE
) -> Judged:
    """Return what the processes of one job did wrong. `meant`: what the script is to do, where that was written."""
    records = sorted(records, key=lambda record: record.rank)
    trained = [record for record in records if record.trace is not None and record.case is not None]
    ended = [_failure(record) for record in records if record.ended]
    own = [*_unwatched(records), *_later_losses(records)]
    if not trained or len(trained) < trained[0].world_size or trained[0].case is None:
        return _failed(ended, own, numerics)
    case = trained[0].case
    traces = _with_global_norms([record.trace for record in trained if record.trace is not None])
    own += [*_otherwise(trained), *differences(meant, case, traces)]
    judged = _judged(_checkpointed(case, traces), Run(traces=traces, failures=()), numerics, meant)
    failures = _failed(ended, [], numerics).findings
    return replace(judged, findings=(*by_cause((*own, *judged.findings)), *failures), case=case)


def _failed(ended: Sequence[RankFailure], own: Sequence[Finding], numerics: Numerics) -> Judged:
    """Return how ranks ended that no trace is complete of."""
    if not ended:
        return Judged(findings=by_cause(own))
    judgement = judge(
        Case(target=TARGET),
        Run(traces=(), failures=tuple(ended)),
        "crash",
        Witnesses(expect=Expectations(Case(target=TARGET), numerics=numerics)),
        checks_of_scripts(),
    )
    return Judged(findings=(*judgement.findings, *own), checks=judgement.checks)


def _judged(case: Case, run: Run, numerics: Numerics, meant: Meant | None) -> Judged:
    expect = Expectations(case, _linears(case, run.by_rank), numerics=numerics)
    witnesses = Witnesses(expect=expect, records=RECORDED)
    judgement = judge(case, run, "ok", witnesses, checks_of_scripts())
    found = judgement.findings
    if run.traces and case.layout.pp == 1:
        found += (*replicas(case, run, {}), *merge_ranks(run, _flushed))
    asked = () if meant is None else meant.rules
    kept = (finding for finding in found if not (is_unmeant(finding.rule, asked) or _is_of_batches(finding)))
    names = tuple(check for check in judgement.checks)
    return Judged(findings=by_cause(kept), checks=names, not_judged=judgement.not_judged)


def is_unmeant(rule: str, asked: Iterable[str] = ()) -> bool:
    """Return True for a rule that a script has not promised to keep, unless it is `asked` for."""
    return any(fnmatch.fnmatch(rule, pattern) for pattern in unmeant()) and rule not in asked


def _is_of_batches(finding: Finding) -> bool:
    """Return True for integers that are alive for longer: a script holds its batches as it likes."""
    return finding.check == "leaks" and str(finding.values.get("tensors", "")).startswith(("int", "bool"))


def _failure(record: ProcessRecord) -> RankFailure:
    head, _, traceback = record.ended.partition("\n")
    return RankFailure(rank=record.rank, kind="raised", message=head, traceback=traceback, phase="", consequence=False)


def _linears(case: Case, traces: Sequence[RankTrace]) -> Model | None:
    """Return the linears that were converted, whose calls are those that were counted."""
    record = traces[0].model if traces else None
    if record is None or case.layout.pp > 1 or traces[0].steps == ():
        return None
    converted = tuple(linear for linear in record.linears if linear.converted)
    calls = {fqn: count * case.layout.dp for fqn, count in record.calls.items()}
    casts = traces[0].operands.casts if traces[0].operands is not None else ()
    return found_model(case, replace(record, linears=converted, calls=calls), record, casts)


def _checkpointed(case: Case, traces: Sequence[RankTrace]) -> Case:
    """Return the case with what the run shows of checkpointing: no wrapper is there where a script calls it itself."""
    again = any(trace.model is not None and any(trace.model.recomputed.values()) for trace in traces)
    mode = case.checkpointing.mode if not again or case.checkpointing.mode != "none" else "selective_op"
    return replace(case, checkpointing=Checkpointing(mode=mode))


def _with_global_norms(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Return the traces with the norm of all ranks in place of the share of each."""
    norms: dict[int, float] = {}
    for trace in traces:
        for step in trace.steps:
            norms[step.step] = norms.get(step.step, 0.0) + step.grad_norm**2
    return tuple(
        replace(trace, steps=tuple(replace(step, grad_norm=norms[step.step] ** 0.5) for step in trace.steps))
        for trace in traces
    )


# What is wrong whatever was meant


def _unwatched(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    ranks = [record.rank for record in records if record.not_watched.startswith("no module was called")]
    if ranks:
        yield NOT_IN_MODEL.finding(ranks=ranks, expected="parameters of the model", found="others")


def _later_losses(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    bad = [(record.not_finite, record.rank) for record in records if record.not_finite is not None]
    for (step, value), rank in sorted(bad)[:1]:
        yield NO_NUMBER.finding(step=step, rank=rank, expected="a finite number", found=str(value), value=str(value))


def _otherwise(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Yield what of the case is another one on some rank."""
    first, *others = [(record.rank, _parts(record.case)) for record in records if record.case is not None]
    for name, there in first[1].items():
        wrong = {rank: parts.get(name) for rank, parts in others if parts.get(name) != there}
        if wrong:
            here = next(iter(wrong.values()))
            expected, found = f"{name} {there}, as on rank {first[0]}", f"{here} on {format_ranks(list(wrong))}"
            values: dict[str, Value] = {"name": name, "here": str(here), "there": str(there), "first": first[0]}
            yield OTHERWISE.finding(ranks=wrong, expected=expected, found=found, values=values)


def _parts(case: Case | None) -> dict[str, object]:
    """Return every option of a case by its name in its part."""
    assert case is not None, "only of ranks that trained"
    parts = (case.layout, case.float8, case.checkpointing, case.train)
    named = {name: value for part in parts for name, value in asdict(part).items() if name != "steps"}
    return named | {"compile": case.compile}


def _flushed(trace: RankTrace) -> list[Finding]:
    """Return the first cast that loses most of its values, with the largest share of any."""
    casts = trace.operands.casts if trace.operands is not None else ()
    lost = [cast for cast in casts if cast.elements and cast.flushed / cast.elements > _MOST_FLUSHED]
    if not lost:
        return []
    first = min(lost, key=lambda cast: (cast.step, cast.index))
    share = first.flushed / first.elements
    return [
        FLUSHED.finding(
            step=first.step,
            module=first.fqn,
            operand=f"{first.role} in {first.phase}",
            expected=f"at most {_MOST_FLUSHED:g} of the values",
            found=f"{share:.3g}",
            size=share if math.isfinite(share) else None,
            share=share,
        )
    ]


def compare(first: ProcessRecord, second: ProcessRecord, *, allowed: float = 0.0) -> tuple[Finding, ...]:
    """Return what the same rank did otherwise the second time: options, counts of a step, then numbers, first to last.

    `allowed`: the relative distance that a gradient or a parameter may have.
    """
    if first.case is None or first.trace is None or second.case is None or second.trace is None:
        gap = first.not_watched or second.not_watched or NO_OPTIMIZER
        raise HarnessError(
            f"a record has no trace: {gap}.", where="compare", fix="compare records of what was trained."
        )
    counts = differences(meant_by(first.case, [first.trace]), second.case, [second.trace])
    distances = relative_distances(assemble([second.trace]), assemble([first.trace]), ignored=0.0)
    wrong = [(key.step, place, key) for place, key in enumerate(distances) if not distances[key] <= allowed]
    numbers = (
        OTHER_NUMBER.finding(
            step=key.step,
            module=key.fqn,
            expected=f"at most {allowed:g}",
            found=f"{distances[key]:.2g}",
            size=distances[key],
            values={"kind": key.kind, "distance": distances[key]},
        )
        for _, _, key in sorted(wrong)[:1]
    )
    return (*counts, *numbers)
