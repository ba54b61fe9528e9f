"""What a rank sends along a mesh axis, and which ranks are neighbours there."""

from __future__ import annotations

import math

from harness.expect.traffic import Transfer
from harness.matrix.case import Layout
from harness.matrix.mesh import AXES, axis_size


def sent_bytes(transfer: Transfer, ranks: int) -> float:
    """What a rank sends in all executions of a transfer among so many ranks, in rings."""
    whole = transfer.payload_bytes * {"all_gather": ranks, "all_reduce": 2}.get(transfer.kind, 1)
    return whole * (ranks - 1) / ranks


def stride(layout: Layout, axis: str) -> int:
    """By how much the numbers of two neighbours on this axis differ: the sizes of the axes that vary faster."""
    return math.prod(axis_size(layout, name) for name in AXES[AXES.index(axis.rsplit("+", maxsplit=1)[-1]) + 1 :])
