"""All checks, in the order in which they are judged and in which findings that are equally near to a cause are told."""

from __future__ import annotations

from collections.abc import Mapping

from harness.checks import (
    alignment,
    clipping,
    divergence,
    evaluation,
    failures,
    finite,
    fp8_on,
    graph_scales,
    graphs,
    leaks,
    live_memory,
    local_parity,
    loss_vs_golden,
    matmuls,
    memory,
    metamorphic,
    model,
    parity,
    recompute,
    resume,
    scales,
    signature,
    stated,
    tokens,
    traffic,
    underflow,
)
from harness.checks.check import Check
from harness.checks.rule import Rule, Stage, by_name
from harness.expect.expectations import Expectations

CHECKS: tuple[Check, ...] = tuple(
    module.CHECK
    for module in (
        finite,
        loss_vs_golden,
        parity,
        tokens,
        model,
        resume,
        clipping,
        evaluation,
        fp8_on,
        alignment,
        graphs,
        matmuls,
        recompute,
        scales,
        graph_scales,
        underflow,
        traffic,
        stated,
        memory,
        live_memory,
        leaks,
        signature,
        local_parity,
        metamorphic,
    )
)
# The rules of every check, and of what is found beside them. Those of the judge are about the whole run.
RULES: Mapping[str, Rule] = by_name(*(check.rules for check in CHECKS), (divergence.OPERAND,), failures.RULES)
MEASURED = ("flops",)  # what no check reads: it is measured and kept (`measuring.py`)
_PLACES = {check.name: place for place, check in enumerate(CHECKS)}


def stage_of(rule: str) -> Stage:
    """How near to the cause findings by a rule are; those of the judge are about the whole run."""
    return RULES[rule].stage if rule in RULES else Stage.RUN


def place_of(check: str) -> int:
    """The place of a check in their order; before all others for the engine and the judge."""
    return _PLACES.get(check, -1)


def probes_of(expect: Expectations, device: str) -> tuple[str, ...]:
    """What ranks must be asked to record of a case on a device: fields of `RankTrace`, in the order of the checks."""
    asked = (record for check in CHECKS if not check.not_judged(expect, device) for record in check.asks(expect))
    return tuple(dict.fromkeys((*(each for each in asked if each not in expect.not_recorded), *MEASURED)))
