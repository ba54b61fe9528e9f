"""The time of collectives over the links in a node and the network between nodes."""

from __future__ import annotations

from harness.expect.traffic import Transfer
from harness.matrix.case import Layout
from harness.performance.machine import Machine
from harness.performance.wire import sent_bytes, stride


def transfer_s(transfer: Transfer, layout: Layout, machine: Machine) -> float:
    """Seconds of all executions of a transfer on one rank, by ring algorithms without contention."""
    sent = sent_bytes(transfer, layout.mesh[transfer.axis])
    return sent / axis_bytes_s(layout, transfer.axis, machine) + transfer.times * machine.rates.collective_us * 1e-6


def axis_bytes_s(layout: Layout, axis: str, machine: Machine) -> float:
    """Bytes per second that a rank of a group along this axis can send.

    The ranks of a group in one node pass on what the network brings, so a group that spans nodes has the network of as
    many devices as it has in a node.
    """
    between = stride(layout, axis)
    if between * layout.mesh[axis] <= machine.gpus_per_node:
        return machine.link_bytes_s
    in_node = max(1, machine.gpus_per_node // between)
    return min(machine.link_bytes_s, in_node * machine.network_bytes_s)
