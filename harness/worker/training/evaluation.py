"""Evaluation: a forward pass of a target without a backward. Probes of training ignore it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from harness.trace.model import StateChange
from harness.worker.process.settings import STATE
from harness.worker.targets.contract import require_loss
from harness.worker.targets.target import Evaluates, Target

_running: list[Target] = []


def evaluating() -> bool:
    return bool(_running)


def evaluate(target: Target, batches: Sequence[Sequence[torch.Tensor]], step: int) -> torch.Tensor | float:
    """The loss of a batch, given as to `step`, as the target evaluates it.

    Keeps what of torch's state the target left changed by it.
    """
    modes = {fqn: module.training for fqn, module in target.model.named_modules()}
    _running.append(target)
    try:
        loss = require_loss(cast("Evaluates", target).evaluate(*batches))
    finally:
        _running.pop()
    phase = f"the evaluation of step {step}"
    STATE.record_changes(phase)
    changed = [fqn for fqn, module in target.model.named_modules() if module.training != modes.get(fqn)]
    if changed:
        before, after = ("on", "off") if modes[changed[0]] else ("off", "on")
        after += f" in {len(changed)} of {len(modes)} modules"
        STATE.changes.append(StateChange(name="training mode", phase=phase, before=before, after=after))
    return loss
