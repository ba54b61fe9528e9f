"""What a rank sends along every mesh axis by ring algorithms, and the time over links in a node and between nodes."""

import functools
import math

import msgspec

from harness.expect.traffic import transfers_if_balanced
from harness.expect.transfer import Transfer
from harness.matrix.case import Case, Layout
from harness.matrix.layout import EXPERT_AXES, MESH_AXES, SEQUENCE_AXES, mesh_with
from harness.plugins.predict.machine import Machine

_ORDER = (*MESH_AXES, *SEQUENCE_AXES, *EXPERT_AXES)


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


def wire(case: Case, *, gpus_per_node: int) -> tuple[AxisTraffic, ...]:
    """The traffic of rank 0 in step 2, which all later steps repeat, by axis, outermost first. Experts are balanced."""
    layout = case.layout
    by_axis: dict[str, list[Transfer]] = {}
    for term in transfers_if_balanced(case, step=2, rank=0):
        by_axis.setdefault(term.axis, []).append(term)
    return tuple(
        AxisTraffic(
            axis=axis,
            ranks=group_size(layout, axis),
            crosses_nodes=crosses_nodes(layout, axis, gpus_per_node),
            calls=sum(term.times for term in by_axis[axis]),
            payload_bytes=sum(term.payload_bytes for term in by_axis[axis]),
            sent_bytes=round(sum(sent_bytes(term, layout) for term in by_axis[axis])),
            # of scales: the loss has maxima of its own
            amax_reductions=sum(term.times for term in by_axis[axis] if term.op == "max" and "amax" in term.purpose),
        )
        for axis in sorted(by_axis, key=lambda axis: _ORDER.index(_axes(layout, axis)[0]))
    )


def sent_bytes(transfer: Transfer, layout: Layout) -> float:
    """Bytes that a rank sends in all executions of a transfer, by ring algorithms."""
    ranks = group_size(layout, transfer.axis)
    whole = transfer.payload_bytes * {"all_gather": ranks, "all_reduce": 2}.get(transfer.kind, 1)
    return whole * (ranks - 1) / ranks


def transfer_s(transfer: Transfer, layout: Layout, machine: Machine) -> float:
    """Seconds of all executions of a transfer on one rank, without contention."""
    sent_s = sent_bytes(transfer, layout) / axis_bytes_s(layout, transfer.axis, machine)
    return sent_s + transfer.times * machine.rates.collective_us * 1e-6


@functools.lru_cache(maxsize=1024)
def axis_bytes_s(layout: Layout, axis: str, machine: Machine) -> float:
    """Bytes per second that a rank of a group along this axis can send.

    The ranks of a group in one node pass on what the network brings, so a group that spans nodes has the network of as
    many devices as it has in a node.
    """
    between = _stride(layout, axis)
    if between * group_size(layout, axis) <= machine.gpus_per_node:
        return machine.link_bytes_s
    in_node = max(1, machine.gpus_per_node // between)
    return min(machine.link_bytes_s, in_node * machine.network_bytes_s)


def crosses_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """True where some group along the axis is not inside of one node. Nodes have consecutive ranks."""
    span = _stride(layout, axis) * group_size(layout, axis)
    return layout.world_size > gpus_per_node and gpus_per_node % span != 0


@functools.lru_cache(maxsize=1024)
def group_size(layout: Layout, axis: str) -> int:
    """Ranks of a group along an axis, or along several that are joined by "+"."""
    axes = _axes(layout, axis)
    return math.prod(mesh_with(layout, axes)[name] for name in axes)


def _stride(layout: Layout, axis: str) -> int:
    """How far apart the ranks of a group are: the product of the degrees of the axes that vary faster."""
    last = _axes(layout, axis)[-1]
    mesh = mesh_with(layout, (last,))
    names = list(mesh)
    return math.prod(mesh[name] for name in names[names.index(last) + 1 :])


def _axes(layout: Layout, axis: str) -> tuple[str, ...]:
    if axis == "world":
        return tuple(name for name in MESH_AXES if layout.mesh[name] > 1)
    return tuple(axis.split("+"))
