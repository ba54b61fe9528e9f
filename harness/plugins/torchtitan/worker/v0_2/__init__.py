"""The torchtitan target: the Trainer of torchtitan 0.2.2 with its converters, its parallelize function and its step.

Nothing of it is repaired here: what it leaves out or gets wrong, a case shows. What it cannot be asked for is a
ValueError that names it (`config.py`). Where it expects a GPU, a named stand-in answers (`shims.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.matrix.targets import TORCHTITAN
from harness.plugins.torchtitan.worker.v0_2.shims import import_torchtitan

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import Target, World


def preload() -> None:
    """Import torchtitan, which takes seconds, before ranks are forked. Starts no thread."""
    import_torchtitan(TORCHTITAN)


def build(case: Case, world: World) -> Target:
    """Build the case with torchtitan's own Trainer. Raises ValueError where torchtitan cannot do what a case asks."""
    import_torchtitan(TORCHTITAN)
    from harness.plugins.torchtitan.worker.v0_2.trainer import trained

    return trained(case, world)
