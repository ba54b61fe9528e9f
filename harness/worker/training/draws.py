"""All draws of the noise (`noise.py`) in one process, where torch has planned every operation once.

A run must have the bits that it has in a process of its own. So each starts from the same random state, and the run
without errors is repeated at the end: where it differs, what a target builds changes what it builds next.
"""

import random

import msgspec
import numpy as np
import torch

from harness.request import RunRequest
from harness.trace import RankTrace
from harness.worker.training.train import ReportPhase, train


def train_draws(
    request: RunRequest, device: torch.device, report_phase: ReportPhase, virtual: tuple[str, ...]
) -> RankTrace:
    """Train without errors and with those of every draw. The trace has no draws where the runs are not independent."""
    noise, drawn = request.noise, random.getstate()
    states = torch.get_rng_state(), np.random.get_state()
    assert noise is not None, "a run without errors has no draws"

    def trained(*draws: int) -> RankTrace:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(drawn)
        errors = msgspec.structs.replace(noise, draws=draws) if draws else None
        return train(msgspec.structs.replace(request, noise=errors), device, report_phase, virtual)

    plain = trained()
    try:
        draws = tuple(map(trained, noise.draws))
        independent = device.type != "cpu" or _numbers(trained()) == _numbers(plain)  # a GPU repeats no bits
    except Exception:  # it may be what builds twice in a process: alone, this draw says whether it fails
        independent = False
    return msgspec.structs.replace(plain, draws=draws) if independent else plain


def _numbers(trace: RankTrace) -> bytes:
    of_steps = [(step.loss, step.grad_norm) for step in trace.steps]
    return msgspec.msgpack.encode((of_steps, trace.sketches))
