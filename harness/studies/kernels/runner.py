"""Runs the kernel checks on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.engine.cluster import JobRunner
from harness.engine.messages import Job, JobOutcome
from harness.studies.kernels.bound import Accumulator
from harness.studies.kernels.judge import KernelConclusion, conclude, conclude_lost
from harness.studies.surviving import run_surviving
from harness.trace.device import KernelBatch, KernelCheck, KernelObservation
from harness.trace.record import Patch

PROGRAM = "harness.worker.kernels.main"
_BASE_DEADLINE_S = 120.0  # a GPU loads its libraries in the first check
_DEADLINE_PER_CHECK_S = 0.5


def run_kernel_checks(
    cluster: JobRunner,
    checks: Sequence[KernelCheck],
    *,
    device: Literal["cpu", "cuda"],
    accumulator: Accumulator,
    injections: Sequence[Patch] = (),
) -> list[KernelConclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the rank fails outside of any check."""
    return run_surviving(
        cluster,
        checks,
        job_of=lambda pending: Job(
            job_id="kernels",
            world_size=1,
            payload=msgspec.msgpack.encode(KernelBatch(checks=pending, device=device, injections=tuple(injections))),
            deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(pending),
        ),
        judge=lambda pending, outcome: [
            conclude(check, seen, accumulator) for check, seen in zip(pending, _observations(outcome), strict=True)
        ],
        conclude_lost=conclude_lost,
        where="evidence kernel",
        fix="check the driver and the memory of this machine.",
    )


def _observations(outcome: JobOutcome) -> list[KernelObservation]:
    return msgspec.msgpack.Decoder(list[KernelObservation]).decode(outcome.ranks[0].payload or b"")
