"""All checks in the order in which they run, all rules, the order of findings, and the signature of a failure.

One fault breaks many things. The rule that a finding is about has a stage, which says how near it is to the cause: a
wrong scale makes gradients wrong, and no gradient makes a scale wrong in the same step. But nothing causes what was
seen in an earlier step: gradients that are wrong in step 1 make scales wrong in step 2. So causes come first if they
are not later than the first wrong number, by stage and then by step; everything else by step and then by stage.

The signature of a failure is what stays the same on every rank and machine, and in every run of the case. Of a crash
that is the exception and the innermost calls of torch and torchao; of findings, the first one: its rule, the values
that tell failures of the rule apart, the kind of module, the operand and the direction. So two runs can be compared,
and so can a case and a smaller one.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from harness.checks import (
    data,
    divergence,
    failures,
    fp8_on,
    graph_scales,
    graphs,
    loss_vs_golden,
    memory,
    metamorphic,
    model,
    module_replay,
    packing,
    parity,
    recompute,
    reported,
    routing,
    scales,
    traffic,
    unshards,
    updates,
)
from harness.checks.check import Check, Rule, Rules, Stage, by_name
from harness.checks.failures import main_stack, place_of, raised_frames
from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.registry import load, plugins
from harness.trace import RankFailure, Run
from harness.verdict import FailureSignature, Finding, Verdict

# The order of findings that are equally near to a cause. Checks of plug-ins come last.
CHECKS: tuple[Check, ...] = (
    reported.check_finite,
    loss_vs_golden.check_loss_vs_golden,
    parity.check_parity,
    packing.check_packing,
    data.check_tokens,
    recompute.check_lifetime,
    model.check_model,
    updates.check_updates,
    data.check_resume,
    reported.check_clipping,
    reported.check_evaluation,
    fp8_on.check_fp8_on,
    fp8_on.check_alignment,
    graphs.check_graphs,
    fp8_on.check_matmuls,
    recompute.check_recompute,
    scales.check_scales,
    unshards.check_unshards,
    graph_scales.check_graph_scales,
    scales.check_underflow,
    routing.check_routing,
    traffic.check_traffic,
    memory.check_memory,
    memory.check_live_memory,
    memory.check_leaks,
    metamorphic.check_profile,
    module_replay.check_module_replay,
    metamorphic.check_metamorphic,
    *(load(place) for plugin in plugins() for place in plugin.checks),
)
_PLACES = {check.name: place for place, check in enumerate(CHECKS)}
if len(_PLACES) < len(CHECKS):  # a plug-in cannot know the names of others
    twice = [name for name, count in Counter(check.name for check in CHECKS).items() if count > 1]
    raise HarnessError(f"two checks have the name {twice[0]}.", where="checks of plug-ins", fix="rename one of them.")

_judge = Rules(
    "judge", Stage.RUN, only={"a known issue": "known gone outdated other-end", "a damaged trace": "no-check broken"}
)
NO_CHECK = _judge("no-check", "no check was executed", judged=False)
BROKEN = _judge("broken", "the harness failed while checking: {error}")
KNOWN = _judge("known", "known issue {fault} ({link}): {reason}")
GONE = _judge("gone", "passed although known issue {fault} ({link}) is on record: remove the record")
UNEXPLAINED = _judge(
    "unexplained",
    "known issue {faults} does not explain {count:n finding|findings} ({rules}): another bug, or a larger effect",
)
MISSING = _judge("missing", "known issue {fault} does not show as recorded: a required finding is missing")
OUTDATED = _judge("outdated", "the record of {fault} was due for review on {day} and no longer explains failures")
OTHER_END = _judge("other-end", "the case failed in another way than recorded")

OF_NO_CASE = by_name([rule for plugin in plugins() for place in plugin.rules for rule in load(place)])
RULES: Mapping[str, Rule] = by_name(
    [
        *(rule for check in CHECKS for rule in check.rules),
        *divergence.RULES.declared,
        *failures.RULES.declared,
        *_judge.declared,
        *OF_NO_CASE.values(),
    ]
)
MEASURED = ("flops", "logprobs")  # what no check reads: it is measured and kept (`measuring.py`)


def probes_of(expect: Expectations, device: str) -> tuple[str, ...]:
    """Return what ranks must be asked to record of a case on a device: fields of `RankTrace`, in check order."""
    asked = (record for check in CHECKS if not check.not_judged(expect, device) for record in check.asks(expect))
    return tuple(dict.fromkeys((*(record for record in asked if record not in expect.never_recorded), *MEASURED)))


# Rules that count, or that give up, say less than those beside them that name what is counted.
_GENERAL = (traffic.VOLUME.name, module_replay.INCOMPARABLE.name)


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings in causal order. Those that could not be checked say nothing about a cause and come last."""
    all_findings = tuple(findings)
    wrong_from = _first_wrong_number(all_findings)

    def key(finding: Finding) -> tuple[int, ...]:
        stage, step, general = _stage_of(finding).place, finding.step or 1, finding.rule in _GENERAL
        rank = _PLACES.get(finding.check, -1), finding.verdict is not Verdict.INVARIANT
        if not finding.judged:
            return (2,)
        if _may_be_cause(finding, wrong_from):
            return (0, stage, step, general, *rank)
        return (1, step, general, stage, *rank)

    ordered = tuple(sorted(all_findings, key=key))
    return (_with_module(ordered[0], ordered), *ordered[1:]) if ordered else ()


def _with_module(first: Finding, others: Sequence[Finding]) -> Finding:
    """Return the first finding; of a norm that is NaN or Inf with the module whose gradient is none in that step."""
    if first.rule != reported.GRAD_NORM.name or first.module is not None:
        return first
    gradients = [other for other in others if (other.rule, other.step) == (parity.GRADIENTS.name, first.step)]
    lost = (other.module for other in gradients if str(other.values.get("norm")).lower() in ("nan", "inf"))
    return replace(first, module=next(lost, None))


def first_effect(findings: Sequence[Finding]) -> int | None:
    """Return the index of the first finding that may follow from those before it; None if there is no such division."""
    wrong_from = _first_wrong_number(findings)
    causes = [_may_be_cause(finding, wrong_from) for finding in findings]
    return causes.index(False) if causes[:1] == [True] and not all(causes) else None


def _stage_of(finding: Finding) -> Stage:
    """Return the stage of its rule; of one from another package or an older version that of findings about a run.

    Replicas that differ, and how, say more about their collective than its number.
    """
    if finding.rule == parity.REPLICAS.name and finding.notes:
        return Stage.COLLECTIVES
    return RULES[finding.rule].stage if finding.rule in RULES else Stage.RUN


def _may_be_cause(finding: Finding, wrong_from: float) -> bool:
    return finding.judged and _stage_of(finding).is_cause and (finding.step or 1) <= wrong_from


def _first_wrong_number(findings: Iterable[Finding]) -> float:
    stages = ((_stage_of(finding), finding) for finding in findings if finding.judged)
    numbers = (finding for stage, finding in stages if not stage.is_cause and stage is not Stage.MEMORY)
    return min((finding.step for finding in numbers if finding.step is not None), default=math.inf)


# The signature of a failure

_FRAMES = 3  # innermost calls that are kept
_LENGTH = 300  # characters of an exception that are kept
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer in a module's name
_STEP = re.compile(r"step (\d+)")
_RANKS = re.compile(r"\b(?:on )?ranks? \d+(?:(?:-|, | and )\d+)*\b")
_NUMBER = re.compile(r"(?<![A-Za-z_\d])[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?:\*\*-?\d+)?(?![A-Za-z_\d])")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|(?<!\w)/[\w./+-]+")
_PLURAL = re.compile(r"\b(N (?:\w+ )?\w+?)s? (?:is|are)\b")


def signature_of(verdict: Verdict, findings: Sequence[Finding], run: Run | None) -> FailureSignature | None:
    """Return the signature of a failure, of a recorded or expected one too; None if nothing failed or is found out."""
    if verdict in (Verdict.INFRA, Verdict.NOT_RUN):
        return None
    if run is not None and run.causes:
        return Counter(map(_of_rank, run.causes)).most_common(1)[0][0]  # of equally many, the lowest rank's
    judged = [finding for finding in findings if finding.judged and finding.rule != KNOWN.name]
    return _of_finding(judged[0]) if judged else None


def normalized(message: str) -> str:
    """Return the message of an exception without what differs from run to run: numbers, addresses, paths, plurals."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    text = _NUMBER.sub("N", _ADDRESS.sub("…", _RANKS.sub("RANKS", line)))
    return _PLURAL.sub(r"\1s are", text)[:_LENGTH].strip()


def _of_rank(failure: RankFailure) -> FailureSignature:
    match = _STEP.search(failure.phase)
    step = int(match[1]) if match else None
    if failure.kind == "stuck":
        place = place_of(main_stack(failure.traceback))
        return FailureSignature(
            kind="hang",
            what=place.collective if place is not None else "",
            where=() if place is None else tuple(f"{call.module}:{call.function}" for call in place.calls),
            first_step=step,
        )
    if failure.kind != "raised":
        return FailureSignature(kind="crash", what=f"{failure.kind}: {normalized(failure.message)}", first_step=step)
    frames = raised_frames(failure.traceback)[-_FRAMES:]
    calls = tuple(f"{call.module}:{call.function}" for call in frames)
    return FailureSignature(kind="crash", what=_unordered(normalized(failure.message)), where=calls, first_step=step)


def _unordered(message: str) -> str:
    """Return which of the ranks that disagree about a collective reports first is chance."""
    head, separator, reports = message.partition("CollectiveMismatch: ranks of one process group disagree: ")
    return f"{head}{separator}{', '.join(sorted(reports.split(', ')))}" if separator else message


def _of_finding(finding: Finding) -> FailureSignature:
    rule = RULES.get(finding.rule)
    values = (str(finding.values.get(name, "")) for name in (rule.key if rule is not None else ()))
    module = finding.module if rule is not None and rule.located else None
    operand = finding.operand.partition(", [")[0]  # without the shape of a cast in a graph
    where = _INDEX.sub("*", module or ""), _NUMBER.sub("N", operand)
    what = ", ".join(filter(None, values))
    return FailureSignature(kind=finding.rule, what=what, where=tuple(filter(None, where)), first_step=finding.step)
