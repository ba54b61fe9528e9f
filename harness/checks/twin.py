"""The BF16 twin's diagnosis of a wrong loss: is the cause FP8, or the layout and the environment?

The twin is BF16 with the same layout, run on the same machine. It runs only when a loss is outside the tolerance around
its golden. It never changes a verdict; it says where to look.
"""

from __future__ import annotations

import math

import msgspec

from harness.checks.assembly import largest
from harness.checks.loss_vs_golden import LOSS
from harness.evidence.golden import Golden
from harness.trace import Run
from harness.verdict import Finding


def needs_twin(findings: tuple[Finding, ...]) -> bool:
    """True when a finding is about the distance of a loss to its golden."""
    return any(finding.rule == LOSS.name for finding in findings)


def with_twin_diagnosis(
    findings: tuple[Finding, ...], run: Run, golden: Golden, twin: Run | None
) -> tuple[Finding, ...]:
    """The findings, with the diagnosis added to those about losses."""
    diagnosis = _diagnosis(_distance(run, golden), None if twin is None else _distance(twin, golden))
    return tuple(
        msgspec.structs.replace(finding, details=f"{finding.details}\n{diagnosis}")
        if finding.rule == LOSS.name
        else finding
        for finding in findings
    )


def _distance(run: Run, golden: Golden) -> float:
    """Largest |loss - golden| in nats over the steps that both have; NaN stays NaN."""
    gaps = [abs(step.loss - loss) for step, loss in zip(run.traces[0].steps, golden.losses, strict=False)]
    return largest(gaps, empty=0.0)


def _diagnosis(found: float, twin: float | None) -> str:
    if twin is None:
        return "BF16 with the same layout could not be run: the layout or the environment may be at fault."
    if not math.isfinite(twin):
        return "The loss of BF16 with the same layout is not finite: not FP8, look at layout and environment."
    if math.isfinite(found) and twin >= found / 2:
        return f"BF16 with the same layout is {twin:.2g} nats away too: not FP8, look at layout and environment."
    return f"BF16 with the same layout is within {twin:.2g} nats of the golden: look at FP8."
