"""Judges what ranks recorded of a script: with the checks of cases that need no reference, and by what no script means.

A rule that follows from the formula of a case is left out (`unmeant.toml`): a script never promised it.
"""

import fnmatch
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness.checks.assembly import assemble, relative_distances
from harness.checks.catalogue import CHECKS, by_cause
from harness.checks.check import Check, Rules, Stage, Witnesses, merge_ranks
from harness.checks.judge import judge
from harness.checks.model import NOTHING_UPDATED
from harness.checks.parity import REPLICAS, replicas
from harness.checks.recompute import SCALE as OLDER
from harness.checks.reported import LOSS
from harness.checks.scales import REPLICAS as OTHER_DATA
from harness.checks.scales import RULES as CASTS
from harness.checks.traffic import NOT_SUMMED
from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.expect.model import Model, found_model
from harness.matrix.case import Case, Checkpointing
from harness.matrix.layout import DP_AXES, peers
from harness.matrix.numerics import VIRTUAL_DEVICE
from harness.plugins.exec.expectations import Meant, differences, meant_by, options_of
from harness.plugins.exec.request import RECORDED, ProcessRecord
from harness.text import format_ranks
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value

_MISSING = "a missing reference"  # what alone breaks a rule of a check that needs one

_rule = Rules("watch", Stage.MODEL)
OTHERWISE = _rule(
    "otherwise",
    "{name} of what is trained is {here} on {ranks}, and {there} on rank {first}",
    key=("name",),
    fix="convert, wrap and distribute the model alike on every rank.",
)
MISSED = _rule(
    "step-missed",
    "{ranks} made {count:n optimizer step}, where {there} made {meant}",
    stage=Stage.RUN,
    fix="call optimizer.step() on all ranks or on none: all_reduce first what decides about it.",
)
TWICE = _rule(
    "backward-twice",
    "backward() begins twice from one loss ({line}): its gradients are added twice",
    fix="call backward() once for each loss.",
)
KEPT = _rule(
    "gradients-kept",
    "backward() adds to the gradients of the step before, and the optimizer steps with both ({line})",
    fix="call optimizer.zero_grad() behind each optimizer.step().",
)
CLEARED = _rule(
    "gradients-cleared",
    "gradients of a microbatch are cleared before the next backward(), and the optimizer steps with the last ({line})",
    fix="call optimizer.zero_grad() once for each optimizer.step(), behind it.",
)
SAME_BATCH = _rule(
    "same-batch",
    "data-parallel {ranks} got the same batch in each of {steps:n step}",
    stage=Stage.DATA,
    fix="give each rank its part: DistributedSampler, accelerator.prepare(loader), a seed of the rank. Where it is "
    'meant: `# fp8-harness: allowed = ["watch/same-batch"]` in the script, or that line in the file of --expect.',
)
UNLIKE = _rule(
    "converted",
    "{count:n linear computes|linears compute} in float8 on {there}, and not on {ranks}: {names}",
    fix="convert the same modules on every rank: let no filter depend on the rank.",
)
NONFINITE = _rule("loss", "the loss is {value} in step {step} on rank {rank}", stage=Stage.NONFINITE, numeric=True)
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
_COMPARE_RANKS = (
    "parity/replicas|scales/(different-per-rank|replicas|shared|amax|range)",
    "model/(parameter|shape|linear|trained|buffer)|fp8_on/(not-)?converted|updates/no-update",
)
_COUNT = ("(scales|matmuls)/number",)
_OF_A_STEP = (*_COUNT, "(traffic|recompute)/.*|lifetime/gathered")
_ALIKE = {
    "grad": "reduce gradients before optimizer.step(): call what DDP or FSDP wraps, and sync in the last backward().",
    "param": "update replicas alike: no lr, clipping or other write to their weights may depend on the rank.",
}
_PRECOMPUTE = "call precompute_float8_dynamic_scale_for_fsdp(model) behind each optimizer.step(), not in front of it."
_MOST_FLUSHED = 0.5  # a cast that loses half of what is not zero keeps no gradient


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and the checks that were executed."""

    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()


def judge_jobs(records: Sequence[ProcessRecord], meant: Meant | None = None) -> Judged:
    """Return what the processes of a command did wrong, of all its jobs; how they ended is said by others."""
    trained = [record for record in records if record.steps or record.not_watched]
    jobs: list[list[ProcessRecord]] = []
    for record in sorted(trained, key=lambda record: record.pid):
        free = (job for job in jobs if job[0].world_size == record.world_size)
        job = next((job for job in free if all(other.rank != record.rank for other in job)), None)
        jobs.append([record]) if job is None else job.append(record)
    judged = [judge_records(job, meant) for job in jobs]
    return Judged(
        findings=tuple(finding for of_job in judged for finding in of_job.findings),
        checks=tuple(dict.fromkeys(name for of_job in judged for name in of_job.checks)),
    )


def checks_of_scripts() -> tuple[Check, ...]:
    """Return the checks that compare a run with no other one."""
    return tuple(check for check in CHECKS if not _needs_another_run(check))


def _needs_another_run(check: Check) -> bool:
    compares = check.needs_profile or check.needs_relation or check.checks_counterpart
    return compares or any(rule.only == _MISSING for rule in check.rules)


@functools.cache
def unmeant() -> Mapping[str, str]:
    """Return the rules that a script has not promised to keep, as patterns, each with the reason."""
    table = tomllib.loads((Path(__file__).parent / "unmeant.toml").read_text())
    return {rule: group["why"] for group in table["unmeant"] for rule in group["rules"]}


def judge_records(records: Sequence[ProcessRecord], meant: Meant | None = None) -> Judged:
    """Return what the processes of one job did wrong. `meant`: what the script is to do, where that was written."""
    records = sorted(records, key=lambda record: record.rank)
    trained = [record for record in records if record.trace is not None and record.case is not None]
    own = [*_unwatched(records), *_later_losses(records), *_mistakes(records), *_missed(records)]
    if not trained or len(trained) < trained[0].world_size or trained[0].case is None:
        return Judged(findings=by_cause([*own, *_otherwise(records), *_unlike(records)]))
    case = trained[0].case
    if any(finding.rule == MISSED.name for finding in own):  # what ranks call step 2 is no longer one step
        return Judged(findings=by_cause(own))
    traces = _with_global_norms([record.trace for record in trained if record.trace is not None])
    own += [*_otherwise(trained), *_same_batches(trained), *differences(meant, case, traces)]
    run = Run(traces=traces, failures=())
    judged = _judged(_checkpointed(case, traces), run, meant, _unknown(trained, case))
    allowed = () if meant is None else meant.allowed
    found = (finding for finding in (*own, *judged.findings) if finding.rule not in allowed)
    return replace(judged, findings=tuple(_with_way_on(case, trained, _loss_first(by_cause(found)))))


def _unknown(records: Sequence[ProcessRecord], case: Case) -> re.Pattern[str]:
    """Return the rules that compare what is not known to be alike.

    Ranks that share more than parameters may hold others. Two losses of one forward have a backward pass each. Where
    optimizers step in turn, no step is a whole one.
    """
    exchanged = case.layout.dp_replicate * case.layout.tp > 1 and any(record.exchanged for record in records)
    passes = (pair for record in records for steps in record.stepped for pair in itertools.pairwise((0, *steps)))
    several = max((after - before for before, after in passes), default=0) > case.train.accumulation
    in_turn = any(len({*record.stepped}) > 1 for record in records)
    return re.compile("|".join(_COMPARE_RANKS * exchanged + _COUNT * several + _OF_A_STEP * in_turn) or "(?!)")


def _judged(case: Case, run: Run, meant: Meant | None, unknown: re.Pattern[str]) -> Judged:
    expect = Expectations(case, _linears(case, run.by_rank), numerics=VIRTUAL_DEVICE)
    witnesses = Witnesses(expect=expect, records=RECORDED)
    judgement = judge(case, run, "ok", witnesses, checks_of_scripts())
    found = judgement.findings
    if run.traces and case.layout.pp == 1:
        found += (*replicas(case, run, {}), *merge_ranks(run, _flushed))
    asked = () if meant is None else meant.rules
    found = tuple(finding for finding in found if not unknown.fullmatch(finding.rule))
    kept = (finding for finding in found if not (is_unmeant(finding.rule, asked) or _is_of_batches(finding)))
    return Judged(findings=tuple(kept), checks=judgement.checks)


def is_unmeant(rule: str, asked: Iterable[str] = ()) -> bool:
    """Return True for a rule that a script has not promised to keep, unless it is `asked` for."""
    return any(fnmatch.fnmatch(rule, pattern) for pattern in unmeant()) and rule not in asked


def _is_of_batches(finding: Finding) -> bool:
    """Return True for integers that are alive for longer: a script holds its batches as it likes."""
    return finding.check == "leaks" and str(finding.values.get("tensors", "")).startswith(("int", "bool"))


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
    steps = ([replace(step, grad_norm=norms[step.step] ** 0.5) for step in trace.steps] for trace in traces)
    return tuple(replace(trace, steps=tuple(own)) for trace, own in zip(traces, steps, strict=True))


# What is wrong whatever was meant


def _unwatched(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    ranks = [record.rank for record in records if record.not_watched.startswith("no module was called")]
    if ranks:
        yield NOT_IN_MODEL.finding(ranks=ranks, expected="parameters of the model", found="others")


def _later_losses(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    bad = [(record.not_finite, record.rank) for record in records if record.not_finite is not None]
    for (step, value), rank in sorted(bad)[:1]:
        yield NONFINITE.finding(step=step, rank=rank, expected="a finite number", found=str(value), value=str(value))


def _mistakes(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    rules = {
        "twice": (TWICE, "one backward() of a loss", "two"),
        "kept": (KEPT, "no gradients where backward() begins", "the ones of step {}"),
        "cleared": (CLEARED, "the gradients of all microbatches", "only the gradients of the last one"),
    }
    for kind, (rule, expected, before) in rules.items():
        seen = {record.rank: record.mistakes[kind] for record in records if kind in record.mistakes}
        for step, at in sorted(seen.values())[:1]:
            line, found = at or "in a package", before.format(step - 1)
            yield rule.finding(step=step, ranks=seen, expected=expected, found=found, line=line)


def _missed(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Yield which rank did not step where others did. Of a run that failed only if ranks are as far by themselves."""
    failed = any(record.exit_code for record in records)
    if failed and len({record.backwards for record in records}) > 1:
        return
    for at in range(min(len(record.stepped) for record in records)):
        steps = {record.rank: record.stepped[at] for record in records}
        most = max(steps.values(), key=lambda made: (len(made), [-before for before in made]))
        mine = min(steps.values(), key=len)
        if len(mine) == len(most):
            continue
        step = 1 + next((at for at, pair in enumerate(zip(mine, most, strict=False)) if pair[0] != pair[1]), len(mine))
        there = format_ranks([rank for rank, made in steps.items() if len(made) == len(most)])
        yield MISSED.finding(
            step=step,
            ranks=[rank for rank, made in steps.items() if len(made) == len(mine)],
            expected=f"optimizer step {step}, as on {there}",
            found="none",
            values={"count": len(mine), "meant": len(most), "there": there},
        )
        return


def _same_batches(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Yield data-parallel ranks with the same inputs and losses, bit for bit, in all steps. Inputs change by step."""
    got: dict[tuple[object, ...], list[int]] = {}
    for record in records:
        losses = tuple(step.loss for step in record.trace.steps) if record.trace is not None else ()
        of_dp = peers(record.case.layout, record.rank, DP_AXES) if record.case is not None else ()
        if not record.exchanged and len({inputs for inputs in record.inputs if inputs}) > 1:
            got.setdefault((of_dp, record.inputs, losses), []).append(record.rank)
    same = max(got.items(), key=lambda item: len(item[1]), default=None)
    if same is not None and len(same[1]) > 1 and len(same[0][0]) > 1:  # type: ignore[arg-type]
        expected, found = "other inputs on each of them", "the same bits, and equal losses"
        yield SAME_BATCH.finding(ranks=same[1], expected=expected, found=found, steps=len(records[0].inputs))


def _unlike(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Yield what is converted on some ranks alone, of a run that failed before it could be traced."""
    known = {record.rank: {*record.converted} for record in records if record.case is not None}
    every = set[str]().union(*known.values())
    for rank, mine in known.items():
        lost = sorted(every - mine)
        if lost:
            ranks = [other for other, theirs in known.items() if not theirs.issuperset(lost)]
            there = format_ranks([other for other in known if other not in ranks])
            expected, found = f"the {len(every)} of {there}", f"{len(mine)} on rank {rank}"
            names = ", ".join(lost[:3] + ["…"] * (len(lost) > 3))
            yield UNLIKE.finding(ranks=ranks, expected=expected, found=found, names=names, count=len(lost), there=there)
            return


def _loss_first(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return a loss that is no number in front of what it makes of casts in the backward pass of its step."""
    begins = [(one.rule, one.operand.rpartition(" ")[2], one.step) for one in findings[:1]]
    for loss in findings:
        if loss.rule == LOSS.name and begins == [(CASTS.nonfinite.name, "backward", loss.step)]:
            fix = "look at what the loss is made of: labels, masks, divisions. The forward casts only finite values."
            return (replace(loss, fix=fix), *(other for other in findings if other is not loss))
    return findings


def _with_way_on(case: Case, records: Sequence[ProcessRecord], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, of replicas that differ with what makes them equal; no update without gradients is told."""
    not_summed = any(one.rule == NOT_SUMMED.name for one in findings)
    batches = {(peers(case.layout, record.rank, ("tp",)), record.inputs) for record in records}
    same_batch = len(batches) == len({ranks for ranks, _ in batches})
    for one in findings:
        if not_summed and one.rule == NOTHING_UPDATED.name:
            continue
        stale = case.float8.fp8_all_gather and one.operand.startswith("weight") and one.step != 1
        kinds = {NOT_SUMMED.name: "grad", REPLICAS.name: str(one.values.get("kind"))}
        fix = _ALIKE.get(kinds.get(one.rule, ""), "")
        fix = _PRECOMPUTE if stale and one.rule in (CASTS.amax.name, OLDER.name) else fix
        if one.rule == OTHER_DATA.name and case.layout.tp > 1 and not one.operand.startswith("weight"):
            where = "what makes the input" if one.operand.startswith("input ") else "the output"
            fix = f"look at {where} of {one.module}: tensor-parallel ranks add up their partial sums there."
            fix = fix if same_batch else "give tensor-parallel ranks the same batch: seed by the data-parallel rank."
        yield replace(one, fix=fix) if fix else one


def _otherwise(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Yield what of the case is another one on some rank."""
    first, *others = [(record.rank, options_of(record.case) if record.case else {}) for record in records]
    for name, there in first[1].items():
        wrong = {rank: parts.get(name) for rank, parts in others if parts.get(name, there) != there}
        if wrong:
            here = next(iter(wrong.values()))
            expected, found = f"{name} {there}, as on rank {first[0]}", f"{here} on {format_ranks(list(wrong))}"
            values: dict[str, Value] = {"name": name, "here": str(here), "there": str(there), "first": first[0]}
            yield OTHERWISE.finding(ranks=wrong, expected=expected, found=found, values=values)


def _flushed(trace: RankTrace) -> list[Finding]:
    """Return the first cast that loses most of its values, with the largest share of any."""
    casts = trace.operands.casts if trace.operands is not None else ()
    lost = [cast for cast in casts if cast.elements and cast.flushed / cast.elements > _MOST_FLUSHED]
    first = sorted(lost, key=lambda cast: (cast.step, cast.index))[:1]
    expected = f"at most {_MOST_FLUSHED:g} of the values"
    places = ((cast.step, cast.fqn, f"{cast.role} in {cast.phase}", cast.flushed / cast.elements) for cast in first)
    return [
        FLUSHED.finding(step=step, module=fqn, operand=of, expected=expected, found=f"{of_all:.3g}", share=of_all)
        for step, fqn, of, of_all in places
    ]


def compare(first: ProcessRecord, second: ProcessRecord, *, allowed: float = 0.0) -> tuple[Finding, ...]:
    """Return what the same rank did otherwise the second time: options, counts of a step, then numbers, first to last.

    `allowed`: the relative distance that a gradient or a parameter may have.
    """
    if first.case is None or first.trace is None or second.case is None or second.trace is None:
        gap = first.not_watched or second.not_watched or "no optimizer was built"
        fix = "compare records of what was trained."
        raise HarnessError(f"a record has no trace: {gap}.", where="compare", fix=fix)
    counts = differences(meant_by(first.case, [first.trace]), second.case, [second.trace])
    distances = relative_distances(assemble([second.trace]), assemble([first.trace]), ignored=0.0)
    wrong = [(key.step, place, key) for place, key in enumerate(distances) if not distances[key] <= allowed]
    numbers = []
    for step, _, key in sorted(wrong)[:1]:
        far, found = distances[key], f"{distances[key]:.2g}"
        values: dict[str, Value] = {"kind": key.kind, "distance": far}
        place = {"step": step, "module": key.fqn, "expected": f"at most {allowed:g}", "found": found, "size": far}
        numbers.append(OTHER_NUMBER.finding(**place, values=values))  # type: ignore[arg-type]
    return (*counts, *numbers)
