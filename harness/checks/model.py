"""Is the model that was built the same on every rank and on one rank, and is all of it trained?

Compares what the harness found out about every rank with the single-rank reference: names, shapes, what is trained,
which linears run. Also finds what no comparison of numbers names: buffers that differ between ranks, parameters that
get no gradient or that no optimizer changes, settings of torch that the target left changed.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from harness.checks.assembly import sketched
from harness.checks.check import Rules, Stage, Witnesses, finished
from harness.checks.updates import WIDE
from harness.matrix.case import Case
from harness.matrix.dims.pp import holds
from harness.matrix.layout import DP_AXES, STAGE_AXES, peers
from harness.promises import Limit
from harness.text import counted, format_ranks
from harness.trace import RankTrace, Run
from harness.trace.model import Buffer, ModelRecord, Parameter
from harness.verdict import Finding, Value

_PROCESS = "it belongs to the whole process."
_HARMFUL = {
    "default dtype": f"set it only for the construction of the model, and set it back: {_PROCESS}",
    "default device": f"use `with torch.device(world.device):` around the construction of the model: {_PROCESS}",
    "gradients": f"use `with torch.no_grad():` where it is needed, not torch.set_grad_enabled(False): {_PROCESS}",
    "training mode": "call `model.train()` after the evaluation.",
}


_rule = Rules("model", Stage.MODEL, only={"an own target": "shape linear reference-without-fsdp initial-weights"})
DTYPE = _rule(
    "dtype",
    "parameter {module} is {dtype}, and the case asks for {asked} ({count:n parameter})",
    fix="convert parameters to the dtype of case.parameter_dtype before the model is distributed: "
    "`model.to(getattr(torch, case.parameter_dtype))`.",
)
PARAMETER = _rule(
    "parameter",
    "this layout builds {here} parameter {module}, and {who} builds {there} ({count:n such name})",
    fix="build the same modules in every layout: weights, gradients and checkpoints of two layouts are matched "
    "by FQN. Wrappers of torch are known; a wrapper of your own must not add a name.",
)
SHAPE = _rule(
    "shape",
    "parameter {module} has another shape than on {who}",
    fix="distribute it as a DTensor (fully_shard, parallelize_module, distribute_tensor), whose shape is "
    "the whole weight's: the harness cannot tell which part of a weight a plain tensor is.",
)
TRAINED = _rule(
    "trained",
    "parameter {module} is {here} here, unlike on {who}",
    fix="set requires_grad the same way in every layout.",
)
LINEAR = _rule(
    "linear",
    "{module} is {here} linear here, and {there} on {who}",
    fix="keep nn.Linear under tensor parallelism and distribute its weight (ColwiseParallel, RowwiseParallel): "
    "only nn.Linear is converted to float8.",
)
CONSTANT = _rule(
    "constant",
    "{name} of {module} is {here} here, and {there} on {who}",
    fix="build every module with the same constants in every layout, and change none of them afterwards.",
)
CALLS = _rule(
    "calls",
    "{module} runs {ours:n time} a step, and {theirs:n time} for the {dp} microbatches of the single-rank reference "
    "({count:n such linear})",
    fix="run the model once for every microbatch that step() is given, and do not join them: a float8 "
    "scale belongs to one microbatch.",
)
BUFFER = _rule(
    "buffer",
    "buffer {module} differs between {pair} ({count:n such buffer})",
    stage=Stage.DATA,
    fix="initialize buffers the same way on every rank and in every layout: seed alike, by case.train.seed and "
    "not by the rank, or broadcast them. The harness writes parameters only, so such a buffer changes what "
    "this rank computes, and what your own training computes too.",
)
NO_FSDP = _rule(
    "reference-without-fsdp",
    "the single-rank reference has no FSDP module but the ranks do, so mixed precision and buffers differ",
    fix="call fully_shard where `world.fsdp` is true, not where `dp_shard > 1`: the reference has one rank, and needs "
    "the same mixed precision.",
)
NO_GRADIENT = _rule("no-gradient", "{count} of {all:n trained parameter} got no gradient in any step: {names}")
UNSEEN_GRADIENTS = _rule(
    "unseen-gradients",
    "parameters change, but no torch optimizer steps, so their gradients cannot be seen",
    fix="derive the optimizer from torch.optim.Optimizer, or leave the gradients in place until step() returns "
    "and clear them at its beginning.",
)
SEVERAL_STEPS = _rule(
    "several-steps",
    "{who} {count} times in one step()",
    fix="call backward() for every microbatch, divided by len(microbatches), and then optimizer.step() once.",
)
NOT_UPDATED = _rule(
    "not-updated",
    "{count} of {all:n trained parameter} got gradients and never changed: {names}",
    fix="pass every parameter of `model` to the optimizer.",
)
NOTHING_UPDATED = _rule(
    "nothing-updated",
    "the optimizer steps, but no parameter of the model ever changes",
    fix="make the optimizer after fully_shard() and parallelize_module(), which replace the parameters, and let "
    "`model` be the module that `step` trains.",
)
NO_STEP = _rule(
    "no-step",
    "no optimizer ever steps, and no parameter changes",
    fix="end step() with optimizer.step() and optimizer.zero_grad().",
)
BUFFER_CHANGED = _rule(
    "buffer-changed",
    "training changes buffer {module}, unlike on {who} ({count:n such buffer})",
    stage=Stage.DATA,
    fix="do not change buffers that the run needs as built, or change them in every layout.",
)
SETTING = _rule("setting", "the target leaves torch's {setting} changed after {phase}")
INITIAL = _rule(
    "initial-weights",
    "{count:n parameter} that {ranks} hold alike {were} built with different values: {module}. Here the harness "
    "writes the weights; your own training would start from different ones on every rank",
    stage=Stage.DATA,
    fix="seed alike on every rank before the model is built (torch.manual_seed(case.train.seed), not seed + "
    "rank), or broadcast the parameters, or load a checkpoint.",
)

# Of a model from another one with this name.
_Difference = Callable[[ModelRecord, ModelRecord, str], Iterable[Finding]]


@_rule.judged_by(
    blind="What is built alike and wrong everywhere; parameters whose updates are lost in their own rounding.",
    unasked="model",
    absent="it is not known what the ranks built",
)
def check_model(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is the model that was built the same on every rank and on one rank, and is all of it trained?"""
    traces = [trace for trace in run.by_rank if trace.model is not None]
    reference = finished(witnesses.solo)
    solo = None if reference is None else reference.traces[0]
    return [
        *_settings(traces),
        *_dtypes(case, traces),
        *_built(case, traces, solo),
        *_buffers(case, traces, solo),
        *_gradients(case, traces),
        *_steps(traces, solo),
        *_updates(case, traces),
    ]


def _record(trace: RankTrace) -> ModelRecord:
    assert trace.model is not None, "traces without a model are left out"
    return trace.model


# What was built


def _built(case: Case, traces: list[RankTrace], solo: RankTrace | None) -> list[Finding]:
    """Return the first difference between a rank and the single-rank reference, or else the first rank."""
    kinds: tuple[_Difference, ...] = (_parameters, _linears, _constants)
    findings = (
        finding
        for kind in kinds
        for trace in traces
        for finding in kind(_record(trace), *_partner(case, trace, traces, solo))
    )
    return [*itertools.islice(findings, 1), *_calls(case, traces, solo)]


def _partner(case: Case, trace: RankTrace, traces: list[RankTrace], solo: RankTrace | None) -> tuple[ModelRecord, str]:
    """Return what a rank is compared with, of which it has what its stages of a pipeline hold, and who that is."""
    if solo is None or solo.model is None:
        first = peers(case.layout, trace.rank, STAGE_AXES)[0]
        return next(_record(other) for other in traces if other.rank == first), f"rank {first}"
    whole = solo.model
    mine = msgspec.structs.replace(
        whole,
        parameters=tuple(parameter for parameter in whole.parameters if holds(case, trace.rank, parameter.fqn)),
        linears=tuple(linear for linear in whole.linears if holds(case, trace.rank, linear.fqn)),
    )
    return mine, "one rank"


def _dtypes(case: Case, traces: list[RankTrace]) -> list[Finding]:
    """Trained parameters of another dtype than the case asks for; bfloat16 may have master weights."""
    asked = case.parameter_dtype
    if case.train.dtype == "bfloat16" and asked != "bfloat16":
        return []
    held = ((trace.rank, one) for trace in traces for one in _record(trace).parameters)
    wrong = {one.fqn: (rank, one.dtype) for rank, one in held if one.trained and one.dtype != asked}
    return [
        DTYPE.finding(rank=rank, module=fqn, expected=asked, found=dtype, dtype=dtype, asked=asked, count=len(wrong))
        for fqn, (rank, dtype) in list(wrong.items())[:1]
    ]


def _parameters(mine: ModelRecord, other: ModelRecord, who: str) -> Iterable[Finding]:
    ours, theirs = ({parameter.fqn: parameter for parameter in record.parameters} for record in (mine, other))
    for fqn in sorted(ours.keys() ^ theirs.keys()):
        (here, there), count = ("a", "none") if fqn in ours else ("no", "one"), len(ours.keys() ^ theirs.keys())
        words: dict[str, Value] = {"here": here, "there": there, "who": who, "count": count}
        expected, found = f"the {counted(len(theirs), 'parameter')} of {who}", counted(len(ours), "parameter")
        yield PARAMETER.finding(module=fqn, expected=expected, found=found, values=words)
    for fqn in sorted(ours.keys() & theirs.keys()):
        if ours[fqn].shape != theirs[fqn].shape:
            expected, found = (str(list(each[fqn].shape)) for each in (theirs, ours))
            yield SHAPE.finding(who=who, module=fqn, expected=expected, found=found)
        elif ours[fqn].trained != theirs[fqn].trained:
            yield TRAINED.finding(who=who, here="trained" if ours[fqn].trained else "frozen", module=fqn)


def _linears(mine: ModelRecord, other: ModelRecord, who: str) -> Iterable[Finding]:
    ours, theirs = ({linear.fqn: linear for linear in record.linears} for record in (mine, other))
    for fqn in sorted(ours.keys() ^ theirs.keys()):
        here = fqn in ours
        yield LINEAR.finding(here="a" if here else "no", there="none" if here else "one", who=who, module=fqn)


def _constants(mine: ModelRecord, other: ModelRecord, who: str) -> Iterable[Finding]:
    ours, theirs = mine.constants, other.constants
    for constant in sorted(ours.keys() & theirs.keys()):
        if ours[constant] != theirs[constant]:
            fqn, _, name = constant.rpartition(".")
            values: dict[str, Value] = {"name": name, "here": ours[constant], "there": theirs[constant], "who": who}
            yield CONSTANT.finding(module=fqn, expected=theirs[constant], found=ours[constant], values=values)


def _calls(case: Case, traces: list[RankTrace], solo: RankTrace | None) -> list[Finding]:
    """Return the linears that run in this layout as often as in every microbatch of the reference."""
    if solo is None or solo.model is None:
        return []
    dp = case.layout.dp
    for trace in traces:
        ours, theirs = _record(trace).calls, solo.model.calls
        wrong = [fqn for fqn in ours if fqn in theirs and ours[fqn] * dp != theirs[fqn]]
        if wrong:
            fqn, (here, there) = wrong[0], (ours[wrong[0]], theirs[wrong[0]])
            expected, found = f"{here} x {dp} times", f"{there} times"
            counts: dict[str, Value] = {"ours": here, "theirs": there, "dp": dp, "count": len(wrong)}
            return [CALLS.finding(rank=trace.rank, module=fqn, expected=expected, found=found, values=counts)]
    return []


def reference_without_fsdp(case: Case, run: Run, solo: Run) -> list[Finding]:
    """Why a run differs from a reference that was built without FSDP2, which casts parameters, inputs and gradients.

    It explains findings and is none where there are no others: in one dtype FSDP2 changes no number.
    """
    records = [trace.model for trace in (*run.traces, *solo.traces)]
    if not case.uses_fsdp or case.layout.dp == 1 or None in records:
        return []
    *ours, reference = ([parameter.axes for parameter in record.parameters] for record in records if record is not None)
    sharded = all(any(axis in DP_AXES for axes in of_rank for axis in axes) for of_rank in ours)
    if not sharded or any(reference):
        return []
    return [NO_FSDP.finding(expected="parameters of fully_shard", found="plain tensors")]


# Buffers


def _buffers(case: Case, traces: list[RankTrace], solo: RankTrace | None) -> list[Finding]:
    """Buffers that ranks with the same tensor-parallel coordinate hold differently, or that one rank has otherwise."""
    by_rank = {trace.rank: {buffer.fqn: buffer for buffer in _record(trace).buffers} for trace in traces}
    reference = {} if solo is None or solo.model is None else {buffer.fqn: buffer for buffer in solo.model.buffers}
    wrong = []
    for fqn in sorted({fqn for buffers in by_rank.values() for fqn in buffers}):
        held = {rank: buffers[fqn] for rank, buffers in by_rank.items() if fqn in buffers}
        unequal = _unequal_pair(case, held, reference.get(fqn))
        if unequal:
            wrong.append((fqn, unequal))
    return [
        *(BUFFER.finding(pair=pair, count=len(wrong), module=fqn) for fqn, pair in wrong[:1]),
        *_changed_buffers(by_rank, reference),
    ]


def _changed_buffers(by_rank: Mapping[int, Mapping[str, Buffer]], reference: Mapping[str, Buffer]) -> list[Finding]:
    """Buffers that training changes on some ranks, and not on one rank; without a reference, not on the others."""
    ranks: dict[str, list[int]] = {}
    still = {fqn for buffers in ([reference] if reference else by_rank.values()) for fqn in _with(buffers, False)}
    for rank, buffers in by_rank.items():
        for fqn in still.intersection(_with(buffers, True)):
            ranks.setdefault(fqn, []).append(rank)
    first = sorted(ranks.items())[:1]
    who = "one rank" if reference else "another rank"
    return [BUFFER_CHANGED.finding(module=fqn, ranks=wrong, who=who, count=len(ranks)) for fqn, wrong in first]


def _with(buffers: Mapping[str, Buffer], changed: bool) -> list[str]:
    return [fqn for fqn, buffer in buffers.items() if buffer.changed is changed]


def _unequal_pair(case: Case, held: Mapping[int, Buffer], reference: Buffer | None) -> str:
    for rank, buffer in held.items():
        for other in peers(case.layout, rank, DP_AXES):
            if other in held and held[other].digest != buffer.digest:
                return f"rank {rank} and rank {other}"
        kind = (buffer.shape, buffer.dtype)
        if reference is not None and kind == (reference.shape, reference.dtype) and buffer.digest != reference.digest:
            return f"rank {rank} and the single-rank reference"
    return ""


# Training


def _gradients(case: Case, traces: list[RankTrace]) -> list[Finding]:
    if not traces or any(trace.sketches is None for trace in traces):
        return []
    trained, graded = [parameter.fqn for parameter in _trained(case, traces)], _gradient_norms(traces)
    idle = [fqn for fqn in trained if fqn not in graded]
    if not idle:
        return []
    if len(idle) == len(trained) and all(step.optimizer_steps == 0 for trace in traces for step in trace.steps):
        if not any(parameter.updated for trace in traces for parameter in _record(trace).parameters):
            return []  # `_updates` reports an optimizer that does nothing
        return [UNSEEN_GRADIENTS.finding(expected="gradients when an optimizer steps", found="none after step()")]
    if len(idle) == len(trained):
        fix = "call loss.backward() before optimizer.step(), and optimizer.zero_grad() only after it."
    else:
        fix = (
            "leave it out or freeze it (requires_grad_(False)) if it is not used. Otherwise the loss loses sight of "
            "it: look for .detach(), .item(), torch.no_grad() or a copy of the weight in the forward."
        )
    counts: dict[str, Value] = {"count": len(idle), "all": len(trained), "names": _first_names(idle)}
    expected = "a gradient of every parameter that is trained"
    return [NO_GRADIENT.finding(module=idle[0], expected=expected, found="none", fix=fix, values=counts)]


def _first_names(fqns: list[str]) -> str:
    return f"{', '.join(fqns[:3])}{', …' if len(fqns) > 3 else ''}"


def _steps(traces: list[RankTrace], solo: RankTrace | None) -> list[Finding]:
    """Optimizers that step more than once in a step, here or in the reference with its many microbatches."""
    runs = [("an optimizer steps", trace) for trace in traces]
    runs += [] if solo is None else [("for all microbatches, an optimizer of the single-rank reference steps", solo)]
    for who, trace in runs:
        several = [step for step in trace.steps if (step.optimizer_steps or 0) > 1]
        if several:
            step, times = several[0].step, several[0].optimizer_steps or 0
            return [SEVERAL_STEPS.finding(who=who, count=times, step=step, expected="1 step", found=f"{times} steps")]
    return []


def _updates(case: Case, traces: list[RankTrace]) -> list[Finding]:
    """Return the parameters with a gradient that training did not change on any rank."""
    if not traces or not traces[0].steps:
        return []
    changed = {parameter.fqn for trace in traces for parameter in _record(trace).parameters if parameter.updated}
    trained = _trained(case, traces)
    norms = _gradient_norms(traces)
    worth = Limit("updates.worth_one") * max(norms.values(), default=0.0)
    wide = (parameter.fqn for parameter in trained if parameter.dtype in WIDE)
    still = [fqn for fqn in wide if fqn not in changed and norms.get(fqn, 0.0) > worth]
    if not trained or not (still or not changed):
        return []
    expected, found = "parameters that training changes", "the values that the harness wrote"
    if changed:
        counts: dict[str, Value] = {"count": len(still), "all": len(trained), "names": _first_names(still)}
        return [NOT_UPDATED.finding(module=still[0], expected=expected, found=found, values=counts)]
    steps = any(step.optimizer_steps for step in traces[0].steps)
    return [(NOTHING_UPDATED if steps else NO_STEP).finding(expected=expected, found=found)]


def _trained(case: Case, traces: list[RankTrace]) -> list[Parameter]:
    """Return the parameters that the first rank trains, and the others of its pipeline."""
    stages = [_record(trace) for trace in traces if trace.rank in peers(case.layout, traces[0].rank, ("pp",))]
    return [parameter for record in stages for parameter in record.parameters if parameter.trained]


def _gradient_norms(traces: list[RankTrace]) -> dict[str, float]:
    """Return the largest norm of a gradient on any rank in any step, by FQN; empty if none were sketched."""
    norms: dict[str, float] = {}
    for key, _, sketch in sketched(traces):
        if key.kind == "grad":
            norms[key.fqn] = max(norms.get(key.fqn, 0.0), sketch.norm_squared**0.5)
    return norms


# The process


def _settings(traces: list[RankTrace]) -> list[Finding]:
    """Return the torch settings that were left changed and that affect other code."""
    changes = dict.fromkeys(one for trace in traces for one in trace.state if one.name in _HARMFUL)
    return [
        SETTING.finding(setting=of.name, phase=of.phase, expected=of.before, found=of.after, fix=_HARMFUL[of.name])
        for of in changes
    ]


def unequal_initial_weights(run: Run) -> list[Finding]:
    """Return the parameters of which several ranks hold the same part, but with different initial values.

    The harness has written its own weights, so nothing in this run is wrong. The target's own training would be.
    """
    holders: dict[tuple[str, tuple[int, ...], int], dict[str, int]] = {}
    for trace in run.by_rank:
        for parameter in trace.model.parameters if trace.model is not None else ():
            place = (parameter.fqn, parameter.offset, parameter.local_elements)
            holders.setdefault(place, {}).setdefault(parameter.built, trace.rank)
    unequal = {fqn: sorted(built.values()) for (fqn, _, _), built in holders.items() if len(built) > 1}
    values: dict[str, Value] = {"count": len(unequal), "were": "was" if len(unequal) == 1 else "were"}
    expected, others = "the same values on every rank that holds this part", "others on "
    return [
        INITIAL.finding(module=fqn, expected=expected, found=others + format_ranks(of[1:]), ranks=of, values=values)
        for fqn, of in sorted(unequal.items())[:1]
    ]
