"""The target torchtitan: its Trainer with the default SPMD backend and its converters.

Nothing of it is repaired here: what it leaves out or gets wrong, a case shows. Where it expects a GPU, a named stand-in
answers (`shims.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.plugins.torchtitan.worker.shims import import_torchtitan

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import Target, World


def preload() -> None:
    """Import torchtitan, which takes seconds, before ranks are forked. Starts no thread."""
    import_torchtitan()


def build(case: Case, world: World) -> Target:
    """Build the case with torchtitan's own Trainer. Raises ValueError where torchtitan cannot do what a case asks."""
    import_torchtitan()
    from harness.plugins.torchtitan.worker.trainer import trained

    return trained(case, world)
