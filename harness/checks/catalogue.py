"""All checks in the order in which they are judged, all rules, and the order in which findings are reported.

One fault breaks many things. The rule that a finding is about has a stage, which says how near it is to the cause: a
wrong scale makes gradients wrong, and no gradient makes a scale wrong in the same step. But nothing causes what was
seen in an earlier step: gradients that are wrong in step 1 make scales wrong in step 2. So causes come first if they
are not later than the first wrong number, by stage and then by step; everything else by step and then by stage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from harness.checks import (
    alignment,
    divergence,
    failures,
    fp8_on,
    graph_scales,
    graphs,
    lifetime,
    live_memory,
    local_parity,
    loss_vs_golden,
    memory,
    metamorphic,
    model,
    parity,
    recompute,
    reported,
    resume,
    routing,
    scales,
    signature,
    tokens,
    traffic,
    underflow,
)
from harness.checks.check import Check
from harness.checks.rule import Rule, Rules, Stage, by_name
from harness.expect.expectations import Expectations
from harness.registry import load, plugins
from harness.verdict import Finding, Verdict

# The order of findings that are equally near to a cause. Checks of plug-ins come last.
CHECKS: tuple[Check, ...] = (
    reported.check_finite,
    loss_vs_golden.check_loss_vs_golden,
    parity.check_parity,
    tokens.check_tokens,
    lifetime.check_lifetime,
    model.check_model,
    resume.check_resume,
    reported.check_clipping,
    reported.check_evaluation,
    fp8_on.check_fp8_on,
    alignment.check_alignment,
    graphs.check_graphs,
    fp8_on.check_matmuls,
    recompute.check_recompute,
    scales.check_scales,
    graph_scales.check_graph_scales,
    underflow.check_underflow,
    routing.check_routing,
    traffic.check_traffic,
    memory.check_memory,
    live_memory.check_live_memory,
    live_memory.check_leaks,
    signature.check_signature,
    local_parity.check_local_parity,
    metamorphic.check_metamorphic,
    *(load(place) for plugin in plugins() for place in plugin.checks),
)
_PLACES = {check.name: place for place, check in enumerate(CHECKS)}

_judge = Rules("judge", Stage.RUN)
NO_CHECK = _judge("no-check", "no check was executed", judged=False)
BROKEN = _judge("broken", "the harness failed while judging: {error}")
KNOWN = _judge("known", "known fault {fault}: {reason} ({link})")
GONE = _judge("gone", "passed although the fault {fault} ({link}) is recorded for it: close the record")
UNEXPLAINED = _judge(
    "unexplained",
    "{count:n finding is|findings are} not explained by the record of {faults} ({rules}): another fault, or a larger "
    "effect",
)
MISSING = _judge("missing", "the recorded fault {fault} does not show as recorded: a finding is missing")
OUTDATED = _judge("outdated", "the record of {fault} was to be reviewed by {day}: it explains nothing any more")
OTHER_END = _judge("other-end", "the case ended otherwise than recorded")

RULES: Mapping[str, Rule] = by_name(
    [
        *(rule for check in CHECKS for rule in check.rules),
        *divergence.RULES.declared,
        *failures.RULES.declared,
        *_judge.declared,
    ]
)
MEASURED = ("flops",)  # what no check reads: it is measured and kept (`measuring.py`)


def probes_of(expect: Expectations, device: str) -> tuple[str, ...]:
    """What ranks must be asked to record of a case on a device: fields of `RankTrace`, in the order of the checks."""
    asked = (record for check in CHECKS if not check.not_judged(expect, device) for record in check.asks(expect))
    return tuple(dict.fromkeys((*(record for record in asked if record not in expect.never_recorded), *MEASURED)))


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings in the order of causes. Those that could not be judged say nothing about a cause and come last."""
    all_findings = tuple(findings)
    wrong_from = _first_wrong_number(all_findings)

    def key(finding: Finding) -> tuple[int, ...]:
        stage, step = _stage_of(finding).place, finding.step or 1
        rank = _PLACES.get(finding.check, -1), finding.verdict is not Verdict.INVARIANT
        if not finding.judged:
            return (2,)
        return (0, stage, step, *rank) if _may_be_cause(finding, wrong_from) else (1, step, stage, *rank)

    return tuple(sorted(all_findings, key=key))


def first_effect(findings: Sequence[Finding]) -> int | None:
    """The index of the first finding that may follow from those before it; None where there is no such division."""
    wrong_from = _first_wrong_number(findings)
    causes = [_may_be_cause(finding, wrong_from) for finding in findings]
    return causes.index(False) if causes[:1] == [True] and not all(causes) else None


def _stage_of(finding: Finding) -> Stage:
    """The stage of rules from other packages or older versions: the same as for findings about the whole run."""
    return RULES[finding.rule].stage if finding.rule in RULES else Stage.RUN


def _may_be_cause(finding: Finding, wrong_from: float) -> bool:
    return finding.judged and _stage_of(finding).is_cause and (finding.step or 1) <= wrong_from


def _first_wrong_number(findings: Iterable[Finding]) -> float:
    stages = ((_stage_of(finding), finding) for finding in findings if finding.judged)
    numbers = (finding for stage, finding in stages if not stage.is_cause and stage is not Stage.MEMORY)
    return min((finding.step for finding in numbers if finding.step is not None), default=math.inf)
