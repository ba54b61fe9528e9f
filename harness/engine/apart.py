"""This machine for jobs that are no cases: they take no slot of the machine and wait for nothing."""

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


class RunsJobs(Protocol):
    """What a `Cluster` is to those who only give it jobs."""

    def run(self, job: Job) -> JobOutcome:
        """Run one job to its end; never raises for what ranks do."""


@contextlib.contextmanager
def apart(program: str, ranks: int) -> Iterator[Cluster]:
    """So many CPU ranks of this rank program, a dotted module name, outside of the slots that runs share."""
    with tempfile.TemporaryDirectory(prefix="fp8-apart-") as folder:
        slots = Leases(Path(folder), ranks)
        node = LocalNode(lambda options: ZygoteEngine(program, options), slots, capacity_here("cpu", ranks))
        with Cluster([node]) as cluster:
            yield cluster
