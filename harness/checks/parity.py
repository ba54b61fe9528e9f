"""Parity: does the layout compute what one rank computes? Losses, every gradient of every step, final parameters.

Compared with the solo witness, not with BF16: FP8 rounding is then the same on both sides. Gradients are compared
themselves, because AdamW hides what is wrong with their size.
"""

from __future__ import annotations

import math

from harness.checks.assembly import (
    Assembled,
    SketchKey,
    assemble,
    relative_distance,
    unequal_replicas,
)
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.trace import Run
from harness.verdict import Finding, Verdict

NAME = "parity"

# A loss is a mean over tokens and moves far less than the worst gradient: measured below 1/20 of it.
LOSS_SHARE = 0.1

# Losses around 8 are float32 tensors in every dtype but float64: one unit in the last place is 5e-7 nats.
FLOAT32_LOSS = 5e-6


def check_parity(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings where the run is further from its solo witness than its kind may be: at the first step that is off.

    Later steps are off because that one was; they are left out unless it has no finding of its own.
    """
    solo, tolerance = witnesses.solo, witnesses.parity_tolerance
    if solo is None:
        return [_finding("the solo witness could not be run: nothing to compare with", expected="a solo witness")]
    if tolerance is None:
        return [_finding("there is no parity tolerance for this kind of case: run `fp8-harness tolerance measure`")]
    found, expected = assemble(run.traces), assemble(solo.traces)
    whole = [*_missing(found, expected), *_replicas(run)]
    loss_floor = 0.0 if case.train.dtype == "float64" else FLOAT32_LOSS
    for step in range(1, case.train.steps + 1):
        allowed = tolerance.per_step[step - 1]
        off = [
            *_gradients(found, expected, step, allowed),
            *_reported(run, solo, step, allowed, loss_floor),
        ]
        if off:
            return whole + off
    return whole + _parameters(found, expected, tolerance.per_step[-1])


def gradient_distances(
    found: dict[SketchKey, Assembled], expected: dict[SketchKey, Assembled], *, step: int, kind: str = "grad"
) -> dict[str, float]:
    """Relative distance of every tensor that both sides sketched at `step`, by FQN."""
    return {
        key.fqn: relative_distance(found[key], expected[key])
        for key in expected
        if key.step == step and key.kind == kind and key in found
    }


def worst_distance(run: Run, solo: Run, *, step: int) -> float:
    """The largest relative distance of any gradient of `step`: what a parity tolerance is fitted to."""
    return worst_distances(run, solo, steps=range(step, step + 1))[0]


def worst_distances(run: Run, solo: Run, *, steps: range) -> tuple[float, ...]:
    """The worst distance of every one of `steps`; NaN for a step of which no gradient was compared."""
    found, expected = assemble(run.traces), assemble(solo.traces)
    return tuple(max(gradient_distances(found, expected, step=step).values(), default=math.nan) for step in steps)


def _gradients(
    found: dict[SketchKey, Assembled], expected: dict[SketchKey, Assembled], step: int, allowed: float
) -> list[Finding]:
    distances = gradient_distances(found, expected, step=step)
    if not distances:
        return [_finding("no gradient of this step was compared", step=step)]
    off = {fqn: distance for fqn, distance in distances.items() if not distance <= allowed}  # NaN is off
    if not off:
        return []
    worst = max(off, key=lambda fqn: math.inf if math.isnan(off[fqn]) else off[fqn])
    norms = found[SketchKey(step, "grad", worst)].norm, expected[SketchKey(step, "grad", worst)].norm
    return [
        Finding(
            check=NAME,
            verdict=Verdict.NUMERIC,
            message=f"gradients of {len(off)} of {len(distances)} parameters are not those of one rank; worst {worst}: "
            f"{off[worst]:.2g} of its norm away, {allowed:.2g} allowed (norm {norms[0]:.6g}, one rank {norms[1]:.6g})",
            step=step,
            module=worst,
            expected=f"distance <= {allowed:.2g}",
            found=f"{off[worst]:.2g}",
        )
    ]


def _reported(run: Run, solo: Run, step: int, allowed: float, loss_floor: float) -> list[Finding]:
    """The loss and the gradient norm that the ranks report. A norm cannot be further off than the worst gradient."""
    expected = solo.traces[0].steps[step - 1]
    return [
        *_number(run, step, "loss", expected.loss, max(allowed * LOSS_SHARE, loss_floor)),
        *_number(run, step, "grad_norm", expected.grad_norm, allowed * expected.grad_norm),
    ]


def _number(run: Run, step: int, name: str, expected: float, allowed: float) -> list[Finding]:
    found = {trace.rank: getattr(trace.steps[step - 1], name) for trace in run.traces if len(trace.steps) >= step}
    off = {rank: value for rank, value in found.items() if not abs(value - expected) <= allowed}  # NaN is off
    if not off:
        return []
    rank = min(off)
    return [
        Finding(
            check=NAME,
            verdict=Verdict.NUMERIC,
            message=f"the {name} is not that of one rank: {abs(off[rank] - expected):.2g} away, {allowed:.2g} allowed",
            step=step,
            rank=rank,
            expected=repr(expected),
            found=repr(off[rank]),
        )
    ]


def _parameters(
    found: dict[SketchKey, Assembled], expected: dict[SketchKey, Assembled], allowed: float
) -> list[Finding]:
    last = max((key.step for key in expected if key.kind == "param"), default=0)
    distances = gradient_distances(found, expected, step=last, kind="param")
    off = {fqn: distance for fqn, distance in distances.items() if not distance <= allowed}
    if distances and not off:
        return []
    if not distances:
        return [_finding("no final parameter was compared")]
    worst = max(off, key=lambda fqn: math.inf if math.isnan(off[fqn]) else off[fqn])
    return [
        Finding(
            check=NAME,
            verdict=Verdict.NUMERIC,
            message=f"{len(off)} of {len(distances)} final parameters are not those of one rank; worst {worst}: "
            f"{off[worst]:.2g} of its norm away, {allowed:.2g} allowed",
            step=last,
            module=worst,
            expected=f"distance <= {allowed:.2g}",
            found=f"{off[worst]:.2g}",
        )
    ]


def _missing(found: dict[SketchKey, Assembled], expected: dict[SketchKey, Assembled]) -> list[Finding]:
    findings = []
    for word, keys in (("is missing", expected.keys() - found.keys()), ("is unknown", found.keys() - expected.keys())):
        for key in sorted(keys)[:1]:
            message = f"{len(keys)} sketches: {key.kind} of {key.fqn} {word} on the ranks of this layout"
            findings.append(_finding(message, step=key.step, module=key.fqn))
    partial = [key for key, tensor in found.items() if not tensor.complete]
    for key in partial[:1]:
        message = f"the ranks hold {found[key].elements} elements of {key.fqn}, which has shape {found[key].shape}"
        findings.append(_finding(message, step=key.step, module=key.fqn))
    return findings


def _replicas(run: Run) -> list[Finding]:
    unequal = unequal_replicas(run.traces)
    if not unequal:
        return []
    key, offset, digests = unequal[0]
    return [
        Finding(
            check=NAME,
            message=f"{len(unequal)} pieces are not the same bits on all ranks that hold them: first {key.kind} of "
            f"{key.fqn} at {offset}",
            step=key.step,
            module=key.fqn,
            expected="one digest",
            found=", ".join(f"rank {rank}: {digest}" for rank, digest in sorted(digests.items())),
        )
    ]


def _finding(message: str, *, step: int | None = None, module: str | None = None, expected: str = "") -> Finding:
    return Finding(check=NAME, message=message, step=step, module=module, expected=expected or None)
