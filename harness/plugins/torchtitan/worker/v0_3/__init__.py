"""The torchtitan_0_3 target: the Trainer of torchtitan 0.3.0 with its default SPMD backend and its converter.

A room of its own beside `torchtitan`, which is 0.2.2: models, options and faults differ (docs/decisions/targets.md).
Both use `torchtitan/shims.py` in place of a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.matrix.targets import TORCHTITAN_0_3
from harness.plugins.torchtitan.worker.v0_2.shims import import_torchtitan

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import Target, World


def preload() -> None:
    """Import torchtitan, which takes seconds, before ranks are forked. Starts no thread."""
    import_torchtitan(TORCHTITAN_0_3)


def build(case: Case, world: World) -> Target:
    """Build the case with torchtitan's own Trainer. Raises ValueError where torchtitan cannot do what a case asks."""
    import_torchtitan(TORCHTITAN_0_3)
    from harness.plugins.torchtitan.worker.v0_3.trainer import trained

    return trained(case, world)
