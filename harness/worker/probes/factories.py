"""Makes the probes that a run asks for, each imported when it is: one that lacks a private part is never imported."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial

from harness.matrix.numerics import Numerics
from harness.worker.probes.probe import ProbeFactory

# By the field of `RankTrace` that each fills; its module in this package has the same name.
PROBES = {
    "sketches": "SketchProbe",
    "operands": "OperandProbe",
    "traffic": "TrafficProbe",
    "saved_memory": "SavedMemoryProbe",
    "graphs": "GraphProbe",
    "flops": "FlopsProbe",
    "module_tensors": "ModuleTensorProbe",
}


def factories(names: Sequence[str], numerics: Numerics) -> dict[str, ProbeFactory]:
    """How each of these probes is made, by its name."""
    unknown = sorted(set(names) - set(PROBES))
    assert not unknown, f"unknown probes {unknown}; there are {sorted(PROBES)}"
    found = {name: getattr(importlib.import_module(f"{__package__}.{name}"), PROBES[name]) for name in names}
    if "module_tensors" in found:
        found["module_tensors"] = partial(found["module_tensors"], numerics=numerics)
    return found
