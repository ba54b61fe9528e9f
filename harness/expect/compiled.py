"""Compiled blocks: how far generated code may be from its graph.

Inductor fuses operators and keeps float32 between them where the graph rounds. So a tensor in bfloat16 differs in its
last bits, and what is cast from it to float8 now and then by one float8 value. Where inductor is asked to round as the
graph does (`emulate_precision_casts`, rowwise), only sums in float32 differ, by their order.
"""

import math

from harness.matrix.case import Case
from harness.promises import Limit
from harness.trace.graphs import GeneratedResult, GradientDistance


def rounding(case: Case) -> Limit:
    """Return how far a tensor that is rounded to what the case computes in may be off, relative to its norm."""
    return Limit(_unit(case).name, Limit("code.units"))


def _unit(case: Case, *, emulated: bool = False) -> Limit:
    if case.train.dtype == "float64":
        return Limit("code.scale")  # scales are float32 whatever the case computes in
    return Limit("code.unit_float32" if emulated else f"code.unit_{case.train.dtype}")


def allowed_distance(case: Case, result: GeneratedResult, *, emulated: bool) -> Limit:
    """Return the largest distance of this tensor that rounding explains. `emulated`: the code rounds as its graph does.

    A value that is off by a share `r` of itself is rounded to a neighbor, a share `s` away, with probability r / s,
    which adds r * s to the square of the distance. The code adds up terms that the graph rounds first: `cancelled`.
    """
    if result.tensor.startswith("scale") and case.float8.traits.power_of_two_scales:
        return Limit("code.moved_rows")
    share = _unit(case, emulated=emulated)
    step = _step(result.dtype)
    if step is not None and share < step:
        return Limit(step.name, Limit("code.units") * math.sqrt(share / 2 / step))
    rows_move = case.float8.traits.power_of_two_scales and not emulated
    return Limit(share.name, Limit("code.units") * result.cancelled * (2 if rows_move else 1))


def _step(dtype: str) -> Limit | None:
    """Return the largest relative distance between neighboring values of a dtype."""
    if dtype.startswith("float8"):
        return Limit(f"code.step_{dtype}")
    return Limit("code.unit_bfloat16") if dtype == "bfloat16" else None


def allowed_row(case: Case, result: GeneratedResult, limit: Limit) -> float:
    """Return the largest distance of one row, where `limit` is the tensor's.

    Where the amax of a row is next to a power of two, its scale, and so its float8 data, may be twice or half as large,
    and products of such a row are rounded differently.
    """
    of_row = Limit("code.row", limit)
    if not case.float8.traits.power_of_two_scales:
        return of_row
    moves = result.tensor.startswith("scale") or result.dtype.startswith("float8")
    return 1.0 if moves else max(of_row, Limit("code.step_float8_e5m2"))


def reduced_distance(case: Case, distance: GradientDistance) -> float:
    """Return how far a gradient may be from the one that generated code returned, relative to its norm.

    On one rank it is the same tensor. FSDP2 rounds it to `reduce_dtype` in every sum, and to the dtype of parameters. A
    sum over TP ranks is rounded to the dtype of the case.
    """
    if distance.summed_over_tp:
        return rounding(case)
    if case.layout.dp == 1:
        return 0.0
    is_rounded = "bfloat16" in (case.train.reduce_dtype, case.parameter_dtype)
    return Limit("code.unit_bfloat16" if is_rounded else "code.scale", Limit("code.units"))
