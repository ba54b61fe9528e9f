"""Generated code: how far its tensors may be from those of its graph, whose operators run one by one.

Inductor fuses operators and keeps float32 between them where the graph rounds. So a tensor in bfloat16 differs in its
last bits, and what is cast from it to float8 now and then by one float8 value. Where inductor is asked to round as the
graph does (`emulate_precision_casts`, rowwise), only sums in float32 differ, by their order.
"""

import math

from harness.matrix.case import Case
from harness.trace.graphs import GeneratedResult, GradientDistance

# One unit in the last place of what the case computes in, relative to the value, at most; in float32 and float64, and
# where bfloat16 is rounded as in the graph, of sums in another order.
UNIT = {"bfloat16": 2.0**-7, "float32": 2.0**-18, "float64": 2.0**-40}
_OF_SCALE = 2.0**-23  # of float32, in which scales are whatever the case computes in

# Between neighbouring values of a dtype, relative to the value, at most.
_STEP = {"float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2, "bfloat16": UNIT["bfloat16"]}

# Units. Of 2 clean runs in bfloat16: 0.7 for a tensor, 0.9 for a scale, which belongs to one element.
MARGIN = 2.0
ROW = 4.0  # a row has fewer elements: at most 2.6 of the limit of a tensor in clean runs
POWERS_OF_TWO = 0.125  # one row of 64 whose scale is another power of two: its amax is next to one


def rounding(case: Case, *, emulated: bool = False) -> float:
    """How far a tensor that is rounded to what the case computes in may be off, relative to its norm."""
    return MARGIN * _unit(case, emulated=emulated)


def _unit(case: Case, *, emulated: bool) -> float:
    return max(UNIT["float32" if emulated and case.train.dtype == "bfloat16" else case.train.dtype], _OF_SCALE)


def allowed_distance(case: Case, result: GeneratedResult, *, emulated: bool) -> float:
    """The largest distance of this tensor which rounding explains. `emulated`: the code rounds as its graph does.

    A value that is off by a share `r` of itself is rounded to a neighbour, a share `s` away, with probability r / s,
    which adds r * s to the square of the distance. Clean bfloat16 runs: 0.021 in e4m3 and 0.037 in e5m2, of 0.044 and
    0.063; where roundings are emulated 0. The code adds up terms that the graph rounds first: the gradient of a bias of
    keys, of which little is left, was 0.024 off.
    """
    if result.tensor.startswith("scale") and case.float8.traits.power_of_two_scales:
        return POWERS_OF_TWO
    share = _unit(case, emulated=emulated)
    if result.dtype in _STEP and share < _STEP[result.dtype]:
        return MARGIN * math.sqrt(share / 2 * _STEP[result.dtype])
    rows_move = case.float8.traits.power_of_two_scales and not emulated  # 0.02 was measured behind such rows
    return MARGIN * share * result.cancelled * (2 if rows_move else 1)


def allowed_row(case: Case, result: GeneratedResult, limit: float) -> float:
    """The largest distance of one row, where `limit` is the tensor's.

    Where the amax of a row is next to a power of two, its scale, and so its float8 data, may be twice or half as large.
    Products of such a row are rounded differently: 0.11 was measured.
    """
    if not case.float8.traits.power_of_two_scales:
        return ROW * limit
    moves = result.tensor.startswith("scale") or result.dtype.startswith("float8")
    return 1.0 if moves else max(ROW * limit, _STEP["float8_e5m2"])


def reduced_distance(case: Case, distance: GradientDistance) -> float:
    """How far a gradient may be from the one that generated code returned, relative to its norm.

    On one rank it is the same tensor. FSDP2 rounds it to `reduce_dtype` in every sum, and to the dtype of parameters. A
    sum over TP ranks is rounded to the dtype of the case.
    """
    if distance.summed_over_tp:
        return rounding(case)
    if case.layout.dp == 1:
        return 0.0
    dtypes = case.train.reduce_dtype, case.parameter_dtype
    return MARGIN * max(UNIT["bfloat16"] if dtype == "bfloat16" else _OF_SCALE for dtype in dtypes)
