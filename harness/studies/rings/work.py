"""The input and the result of a ring, and the error of an interrupted one."""

from __future__ import annotations

from typing import NamedTuple

from harness.engine.hardware import open_leases
from harness.engine.leases import Leases
from harness.evidence.ring import RingItem
from harness.matrix.faults import Fault
from harness.project import Project
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.trace.device import TorchFacts


class Work(NamedTuple):
    """What a ring works with. `facts`: None on a CPU. `faults`: none for the usual ones. `seeds`: of the noise."""

    project: Project
    plan: Plan
    progress: Progress
    facts: TorchFacts | None
    faults: tuple[Fault, ...]
    seeds: int
    command: str  # as it was given

    @property
    def slots(self) -> int:
        """Ranks that run at the same time: devices of this machine, or slots of its CPU."""
        return self.plan.capacity.largest

    @property
    def leases(self) -> Leases:
        """The slots of this machine that cases of this plan run on."""
        return open_leases(self.project.lease_folder(), self.plan.device, self.slots)


class Found(NamedTuple):
    """What a ring found, and notes on what it left out."""

    items: tuple[RingItem, ...]
    notes: tuple[str, ...] = ()


class Interrupted(Exception):
    """Ctrl-C ended a ring early: what is known of it must not replace what is stored."""
