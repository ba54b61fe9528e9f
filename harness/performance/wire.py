"""What a rank sends along every mesh axis, and which axes leave a node."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from harness.expect.traffic import Transfer, expected_transfers
from harness.matrix.case import Case, Layout
from harness.matrix.layout import MESH_AXES


class AxisTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one rank and step along one axis.

    `payload_bytes`: their inputs on this rank. `sent_bytes`: what it sends in rings. `crosses_nodes`: some group of the
    axis has ranks of several nodes. `amax_reductions`: those of the calls that reduce an amax.
    """

    axis: str
    ranks: int
    crosses_nodes: bool
    calls: int
    payload_bytes: int
    sent_bytes: int
    amax_reductions: int


def wire(case: Case, *, rank: int, gpus_per_node: int) -> tuple[AxisTraffic, ...]:
    """The traffic of a rank in step 2, which all later steps repeat, by axis, outermost first."""
    found: dict[str, list[Transfer]] = {}
    for term in expected_transfers(case, step=2, rank=rank):
        found.setdefault(term.axis, []).append(term)
    order = sorted(found, key=lambda axis: MESH_AXES.index(_axes(case.layout, axis)[0]))
    return tuple(_along(case.layout, axis, found[axis], gpus_per_node) for axis in order)


def _along(layout: Layout, axis: str, terms: Iterable[Transfer], gpus_per_node: int) -> AxisTraffic:
    ranks, terms = group_size(layout, axis), tuple(terms)
    return AxisTraffic(
        axis=axis,
        ranks=ranks,
        crosses_nodes=crosses_nodes(layout, axis, gpus_per_node),
        calls=sum(term.times for term in terms),
        payload_bytes=sum(term.payload_bytes for term in terms),
        sent_bytes=round(sum(sent_bytes(term, ranks) for term in terms)),
        amax_reductions=sum(term.times for term in terms if reduces_amax(term)),
    )


def sent_bytes(transfer: Transfer, ranks: int) -> float:
    """Bytes that a rank sends in all executions of a transfer among `ranks` ranks, by ring algorithms."""
    whole = transfer.payload_bytes * {"all_gather": ranks, "all_reduce": 2}.get(transfer.kind, 1)
    return whole * (ranks - 1) / ranks


def reduces_amax(transfer: Transfer) -> bool:
    """True for a reduction of a scale; the loss has maxima of its own."""
    return transfer.op == "max" and "amax" in transfer.purpose


def group_size(layout: Layout, axis: str) -> int:
    """Ranks of a group along an axis, or along several that are joined by "+"."""
    return math.prod(layout.mesh[name] for name in _axes(layout, axis))


def stride(layout: Layout, axis: str) -> int:
    """The rank stride of this axis: the product of the sizes of the axes that vary faster."""
    return math.prod(layout.mesh[name] for name in MESH_AXES[MESH_AXES.index(_axes(layout, axis)[-1]) + 1 :])


def crosses_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """True where some group along the axis is not inside of one node. Nodes have consecutive ranks."""
    span = stride(layout, axis) * group_size(layout, axis)
    return layout.world_size > gpus_per_node and gpus_per_node % span != 0


def _axes(layout: Layout, axis: str) -> tuple[str, ...]:
    if axis == "world":
        return tuple(name for name in MESH_AXES if layout.mesh[name] > 1)
    return tuple(axis.split("+"))
