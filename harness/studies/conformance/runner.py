"""Runs the conformance checks on their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.engine.cluster import JobRunner
from harness.engine.messages import Job, JobOutcome
from harness.sources import installed_version
from harness.studies.conformance.judge import Conclusion, conclude, conclude_lost
from harness.studies.surviving import run_surviving
from harness.trace.operator_checks import WORLD_SIZE, Batch, Observation, OperatorCheck
from harness.trace.record import Patch

PROGRAM = "harness.worker.conformance.main"

# A check takes about 6 ms on two busy cores. A hanging rank must not delay a small run by more than a minute.
_BASE_DEADLINE_S = 45.0
_DEADLINE_PER_CHECK_S = 0.1


def run_checks(
    engine: JobRunner, checks: Sequence[OperatorCheck], injections: Sequence[Patch] = ()
) -> list[Conclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the ranks fail outside of any check."""
    return run_surviving(
        engine,
        checks,
        job_of=lambda pending: Job(
            job_id="conformance",
            world_size=WORLD_SIZE,
            payload=msgspec.msgpack.encode(Batch(checks=pending, injections=tuple(injections))),
            deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(pending),
            one_node=True,
        ),
        judge=_concluded,
        conclude_lost=conclude_lost,
        where="conformance",
        fix="check the memory of this machine, and --inject.",
    )


def _concluded(pending: Sequence[OperatorCheck], outcome: JobOutcome) -> list[Conclusion]:
    torch = installed_version("torch") or "0"
    return [conclude(*each, torch=torch) for each in zip(pending, _observations(outcome), strict=True)]


def _observations(outcome: JobOutcome) -> list[tuple[Observation, ...]]:
    """The observations of all ranks, by check."""
    ranks = [msgspec.msgpack.decode(rank.payload or b"", type=list[Observation]) for rank in outcome.ranks]
    return list(zip(*ranks, strict=True))
