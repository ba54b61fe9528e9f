"""Targets: what trains a case. Those of the harness and of plug-ins by name, a user's own by the name of its module.

The interface of a target is in `worker/targets/target.py`. Here is what the controller knows without importing one.
"""

import functools
import re
from collections.abc import Mapping

from harness.registry import Target, plugins

REFERENCE = "reference"
OF_DTENSOR = "the formula is for modules that compute with DTensor"  # and not for plain shards

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@functools.cache
def targets() -> Mapping[str, Target]:
    """The targets that have a name: the reference, and those of plug-ins."""
    reference = Target(module="harness.worker.targets.reference.build", llama=True)
    return {REFERENCE: reference, **{name: target for plugin in plugins() for name, target in plugin.targets.items()}}


def module_of(target: str) -> str:
    return targets()[target].module if target in targets() else target


def is_llama(target: str) -> bool:
    """True when shapes and names of the model follow from the case. Of any other, what must be seen is found out."""
    return target in targets() and targets()[target].llama


def computes_on_plain_shards(target: str) -> bool:
    """True when the operands of modules under TP cannot be put together, or compared with those of one rank."""
    return target in targets() and targets()[target].plain_shards
