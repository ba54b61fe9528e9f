"""Injected faults: functions that patch torch, torchao or the target the way a real bug would change them.

`plant` runs in every rank after the virtual device is installed and before the probes and the target are built, so that
probes record the effect. `harness/plugins/faults/faults.toml` lists and describes the faults.

A fault is a change and the hook that injects it: `@planted(hook, …)` above a function, or `partial(hook, …, change)`.
"""

import importlib

from harness.plugins.faults.faults import Fault, FaultClass, fault_named
from harness.plugins.faults.worker import hooks

# The modules of every fault class; a fault is injected by the function of its name. Each is imported where one of its
# faults is planted: that of compiled blocks needs inductor, which takes longer than most ranks train.
FAULT_MODULES: dict[FaultClass, tuple[str, ...]] = {
    "A": ("amax",),
    "B": ("stale",),
    "C": ("conversion",),
    "D": ("communication", "conversion", "pipelines", "replicas"),
    "E": ("execution", "packing"),
    "F": ("execution",),
    "G": ("training", "loss", "conversion", "muon", "packing"),
    "H": ("compiled", "conversion", "execution"),
    "I": ("stale",),
    "J": ("mxfp8", "blockwise"),
    "K": ("experts",),
    "L": ("pipelines",),
    "M": ("context",),
}


def plant(name: str) -> None:
    """Plant a fault in this process, for the rest of its life."""
    hooks.follow_run()
    function_of(fault_named(name))()


def function_of(fault: Fault) -> hooks.Plant:
    """Return the function that injects a fault."""
    modules = (importlib.import_module(f"{__name__}.{name}") for name in FAULT_MODULES[fault.group])
    candidates = (getattr(module, fault.name, None) for module in modules)
    return next(function for function in candidates if function is not None)
