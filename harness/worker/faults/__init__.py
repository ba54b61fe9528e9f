"""Planted faults: functions that patch torch, torchao or the target the way a real bug would change them.

`plant` runs in every rank after the virtual device is installed and before the probes and the target are built, so that
probes record the effect. `harness/matrix/faults.toml` lists and describes the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from harness.matrix.faults import Fault, FaultClass, fault_named
from harness.worker.faults import (
    amax,
    communication,
    compiled,
    conversion,
    execution,
    kept,
    loss,
    parameters,
    resuming,
    shapes,
    stale,
    training,
)

# The modules of every fault class; a fault is planted by the function of its name.
FAULT_MODULES: dict[FaultClass, tuple[ModuleType, ...]] = {
    "A": (amax,),
    "B": (stale,),
    "C": (conversion, parameters),
    "D": (communication, parameters),
    "E": (execution,),
    "F": (shapes,),
    "G": (training, loss, parameters, resuming),
    "H": (compiled,),
    "I": (kept,),
}


def plant(name: str) -> None:
    """Plant a fault in this process, for the rest of its life."""
    function_of(fault_named(name))()


def function_of(fault: Fault) -> Callable[[], None]:
    """The function that plants a fault."""
    modules = FAULT_MODULES[fault.group]
    found: Callable[[], None] = next(getattr(module, fault.name) for module in modules if hasattr(module, fault.name))
    return found
