"""Derived tolerances: how far a run may be from BF16 and from one rank where no tolerance was measured.

They come from BF16 runs of the model, data and steps of the case on one rank, with random errors as large as those of
float8 (`worker/training/noise.py`). No FP8 code runs in them, so a fault of it cannot widen what it is judged
by, and nothing is borrowed from another model. `tests/worker/test_noise.py` compares them with measured tolerances.
"""

import itertools
import math
from collections.abc import Sequence

from harness.checks.assembly import largest, nan_as_inf
from harness.checks.parity import IGNORED, worst_distances
from harness.evidence.tolerance import LOSS_VS_GOLDEN, PARITY, SAME_ORDER, Tolerance, parity_key, tolerance_key
from harness.matrix.case import Case
from harness.matrix.numerics import (
    VIRTUAL_DEVICE,
    Numerics,
    activations_differ,
    clips_by_a_rounded_norm,
    rounding_of_norm,
)
from harness.trace import Run

DRAWS = 4

# Of the root mean square of the distances: a few draws do not show the largest, and rounding to nearest repeats its
# errors from step to step, which random errors do not. Measured distances are at most 6 of these.
LOSS_MARGIN = 12.0
FIRST_STEPS = 3  # they share one number, from all their distances: each has few, and they are close to each other

ADDED = 1e-6  # sums of the same gradients in float32, in two orders: 6e-8 apart for eight of them

# Under TP a rounding may send a token to another expert, which moves the gradients of routers and experts. The largest
# distance in 112 runs was 0.23; four draws may miss it. Local parity repeats the run's own choices, and is sharper.
SENT_ELSEWHERE = 2 * 0.23

PARITY_MARGIN = 3.0  # of the largest distance; the same as of measured tolerances


def derived_tolerance(case: Case, reference: Run, draws: Sequence[Run]) -> Tolerance:
    """How far the losses of the case may be from BF16, in nats: never less than at an earlier step."""
    expected = [step.loss for step in reference.traces[0].steps]
    drawn = [
        [abs(step.loss - loss) for step, loss in zip(draw.traces[0].steps, expected, strict=True)] for draw in draws
    ]
    first = _root_mean_square([distance for distances in drawn for distance in distances[:FIRST_STEPS]])
    later = [_root_mean_square(_without_farthest(distances)) for distances in zip(*drawn, strict=True)]
    per_step = _never_less([first] * len(expected[:FIRST_STEPS]) + later[FIRST_STEPS:])
    return _tolerance(
        LOSS_VS_GOLDEN, tolerance_key(case), [LOSS_MARGIN * distance for distance in per_step], LOSS_MARGIN
    )


def derived_parity_tolerance(
    case: Case, reference: Run, draws: Sequence[Run], numerics: Numerics = VIRTUAL_DEVICE
) -> Tolerance:
    """How far any gradient may be from the single-rank one, relative to its norm: as far as two roundings are apart.

    With experts every draw counts: it is no accident there that a rounding sends a token to another expert.
    """
    steps = range(1, case.train.steps + 1)
    drawn = zip(*(worst_distances(draw, reference, steps=steps, ignored=IGNORED) for draw in draws), strict=True)
    counted = ([*distances] if case.model.experts else _without_farthest(distances) for distances in drawn)
    per_step = _never_less([PARITY_MARGIN * largest(distances) for distances in counted])
    if case.model.experts and case.layout.tp > 1:
        per_step = [max(allowed, SENT_ELSEWHERE) for allowed in per_step]
    key = parity_key(case, numerics)
    if key == SAME_ORDER:  # equal gradients, added up in the order that the target chose
        per_step[0] = ADDED
    elif clips_by_a_rounded_norm(case) and not activations_differ(case, numerics) and case.compile != "inductor":
        # generated code rounds elsewhere: a gradient that is reduced in bfloat16 was 2.5e-5 off
        per_step[0] = rounding_of_norm(case)
    return _tolerance(PARITY, key, per_step, PARITY_MARGIN)


def _without_farthest(distances: Sequence[float]) -> list[float]:
    """The distances without the largest or a NaN: one draw may hit a step in which training is unstable."""
    return sorted(distances, key=nan_as_inf)[:-1]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _never_less(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, lambda *pair: largest(pair)))


def _tolerance(name: str, key: str, per_step: Sequence[float], margin: float) -> Tolerance:
    evidence = f"derived from {DRAWS} BF16 runs with rounding errors of float8"
    return Tolerance(name=name, key=key, per_step=tuple(per_step), margin=margin, evidence=evidence, derived=True)
