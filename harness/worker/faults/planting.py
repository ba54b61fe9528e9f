"""Planting: from the name of a fault to the patch in this rank."""

from __future__ import annotations

from types import ModuleType

from harness.planted.faults import FaultClass, fault_named
from harness.worker.faults import amax, communication, compiled, conversion, execution, shapes, stale, training

# Every fault is the function of its name in the file of its class.
FILES: dict[FaultClass, ModuleType] = {
    "A": amax,
    "B": stale,
    "C": conversion,
    "D": communication,
    "E": execution,
    "F": shapes,
    "G": training,
    "H": compiled,
}


def plant(name: str) -> None:
    """Plant a fault of the catalogue in this process, for the rest of its life."""
    getattr(FILES[fault_named(name).group], name)()
