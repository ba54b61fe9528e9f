"""Measures the communication cost of operators, and resynchronizes ranks after one of them left a collective.

Counts exchanges on the virtual fabric, below every layer of torch that moves data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.worker.virtual.collectives import FABRIC
from harness.worker.virtual.fabric import CollectiveMismatch, Group, Loopback

Exchange = Callable[..., list[torch.Tensor]]


class Meter:
    """Counts the exchanges of the watched groups since the last `start`."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, int, int]] = []
        self._watched: set[int] = set()

    def watch(self, mesh: DeviceMesh) -> None:
        """Count the exchanges on all axes of `mesh`. Every rank of the mesh must call this."""
        for group in groups(mesh):
            if id(group) not in self._watched:
                self._watched.add(id(group))
                setattr(group, "exchange", self._counted(group.exchange, group.size))  # noqa: B010  mypy rejects assigning to a method

    def start(self) -> None:
        """Reset the counts."""
        self._calls.clear()

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank had to receive, with the best algorithm for every collective."""
        return sum(received_bytes(*call) for call in self._calls)

    @property
    def calls(self) -> tuple[str, ...]:
        """One line per collective."""
        return tuple(f"{kind} of {count} bytes among {size}" for kind, count, size in self._calls)

    def _counted(self, exchange: Exchange, size: int) -> Exchange:
        def counting(kind: str, payload: torch.Tensor, **options: Any) -> list[torch.Tensor]:
            self._calls.append((kind, payload.numel(), size))
            return exchange(kind, payload, **options)

        return counting


def received_bytes(kind: str, payload_bytes: int, size: int) -> float:
    """Bytes that a rank receives in a collective of `size` ranks to which it sends `payload_bytes`."""
    if kind == "all_to_all":
        payload_bytes -= 8 * size  # the fabric also sends a table of the splits
    factors = {
        "barrier": 0.0,
        "all_gather": size - 1.0,
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
    }
    return factors.get(kind, 1.0) * payload_bytes


def groups(mesh: DeviceMesh) -> list[Group | Loopback]:
    """The fabric groups of all axes of a mesh."""
    found = []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        ranks = functools.partial(dist.get_process_group_ranks, group)
        found.append(FABRIC.group(group.group_name, ranks, group.rank))
    return found


def resynchronize(mesh: DeviceMesh) -> None:
    """Wait for every rank of the mesh, even those that are still in a collective that this one left.

    For a rank still in a collective, this barrier is a CollectiveMismatch, which makes it leave the operator and call
    this function too; until then the barrier is retried.
    """
    for group in groups(mesh):
        while not _pass_barrier(group):
            pass


def _pass_barrier(group: Group | Loopback) -> bool:
    try:
        group.exchange("barrier", torch.empty(0, dtype=torch.uint8))
    except CollectiveMismatch:
        return False
    return True
