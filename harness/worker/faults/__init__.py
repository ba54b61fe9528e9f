"""Planted faults: functions that patch torch, torchao or the target the way a real bug would change them.

`plant` runs in every rank after the virtual device is installed and before the probes and the target are built, so that
probes record the effect. `harness/matrix/faults.toml` lists and describes the faults.
"""

from __future__ import annotations

from types import ModuleType

from harness.matrix.faults import FaultClass, fault_named
from harness.worker.faults import amax, communication, compiled, conversion, execution, kept, shapes, stale, training

# The module of every fault class; a fault is planted by the function of its name.
FAULT_MODULES: dict[FaultClass, ModuleType] = {
    "A": amax,
    "B": stale,
    "C": conversion,
    "D": communication,
    "E": execution,
    "F": shapes,
    "G": training,
    "H": compiled,
    "I": kept,
}


def plant(name: str) -> None:
    """Plant a fault in this process, for the rest of its life."""
    getattr(FAULT_MODULES[fault_named(name).group], name)()
