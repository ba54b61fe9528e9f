"""Numerics: which bits of a run are promised, by what its collectives run on and what multiplies.

Only the shared fabric sums in rank order, whatever the number of ranks. gloo and NCCL sum in the order in which data
goes around; of two addends there is one order only. A GPU chooses a kernel by the shape of the operands, and each has
its own order of accumulation.
"""

from __future__ import annotations

import msgspec

from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES

_ONE_ORDER = 2  # ranks


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """`in_rank_order`: sums over ranks are, of any number. `same_in_parts`: a part of a matmul has the bits of it."""

    in_rank_order: bool = True
    same_in_parts: bool = True

    def has_one_order(self, ranks: int) -> bool:
        """True when the sum over a group of so many ranks has the bits of a sum in rank order."""
        return self.in_rank_order or ranks <= _ONE_ORDER


VIRTUAL_DEVICE = Numerics()


def sums_in_order(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True where the single-rank reference has every sum over ranks in the same order."""
    layout = case.layout
    if layout.tp > 1 or (layout.dp_replicate > 1 and case.train.reduce_dtype != "bfloat16"):
        return False
    return all(numerics.has_one_order(layout.mesh[axis]) for axis in DP_AXES)


def async_tp_gap(case: Case, numerics: Numerics) -> str | None:
    """Why async TP may give other bits than TP; None where it gives the same, or the case has none of it."""
    if not case.layout.async_tp:
        return None
    if not numerics.same_in_parts:
        return "async TP multiplies in chunks, and a kernel is chosen by their shape: bits of TP and async TP differ"
    if not numerics.has_one_order(case.layout.tp):
        return "async TP sums in rank order, and this fabric does not: bits of TP and async TP differ"
    return None
