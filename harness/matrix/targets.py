"""Targets: what trains a case. Built-in ones by name, a user's own by the dotted name of its module.

The interface of a target is in `worker/targets/target.py`. Here is what the controller knows without importing one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REFERENCE = "reference"
TORCHTITAN_0_3 = "torchtitan_0_3"

# The modules of the built-in targets.
MODULES: Mapping[str, str] = {
    REFERENCE: "harness.worker.targets.reference.build",
    TORCHTITAN_0_3: "harness.plugins.torchtitan.worker",
}

# The version of torchtitan that a target drives, and is named for: so a case means the same wherever it is read.
VERSIONS: Mapping[str, str] = {TORCHTITAN_0_3: "0.3.0"}

# The options of torchtitan's section `parallelism` for the degrees of a mesh.
_DEGREES: Mapping[str, str] = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}

# Targets that train the Llama of `linears.py`. Of any other model, what must be seen is found out.
_LLAMAS = frozenset(MODULES)

# Targets whose modules get plain tensors under TP: nothing tells which part of the logical tensor a rank has.
_ON_PLAIN_SHARDS = frozenset({TORCHTITAN_0_3})
OF_DTENSOR = "the formula is for modules that compute with DTensor"  # and not of those

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def module_of(target: str) -> str:
    return MODULES.get(target, target)


def is_llama(target: str) -> bool:
    """True when shapes and names of the model follow from the case."""
    return target in _LLAMAS


def computes_on_plain_shards(target: str) -> bool:
    """True when the operands of modules under TP cannot be put together, or compared with those of one rank."""
    return target in _ON_PLAIN_SHARDS


def torchtitan_degrees(mesh: Mapping[str, int]) -> dict[str, int]:
    """The degrees of a mesh by torchtitan's options, in its section `parallelism`."""
    return {_DEGREES[axis]: degree for axis, degree in mesh.items()}
