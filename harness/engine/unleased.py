"""A cluster on this machine without leases: its jobs take no slots from cases and wait for nothing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from harness.engine.capacity import capacity_here
from harness.engine.cluster import Cluster
from harness.engine.leases import Leases
from harness.engine.messages import Job, JobOutcome
from harness.engine.node import LocalNode
from harness.engine.zygote_engine import ZygoteEngine


class JobRunner(Protocol):
    """The part of a `Cluster` that callers need who only submit jobs."""

    def run(self, job: Job) -> JobOutcome:
        """Run one job and return its outcome, also when its ranks fail."""


@contextlib.contextmanager
def unleased_cluster(program: str, ranks: int) -> Iterator[Cluster]:
    """Yield a cluster of `ranks` CPU slots of its own, whose ranks run `program`, a dotted module name."""
    with tempfile.TemporaryDirectory(prefix="fp8-apart-") as folder:
        slots = Leases(Path(folder), ranks)
        node = LocalNode(lambda options: ZygoteEngine(program, options), slots, capacity_here("cpu", ranks))
        with Cluster([node]) as cluster:
            yield cluster
