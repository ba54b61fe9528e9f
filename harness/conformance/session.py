"""The session: checks to ranks and back, in one job; a check that takes its job down is left out of the next one.

Owns jobs and their folders; knows neither torch nor what is right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Protocol

import msgspec

from harness.conformance.check import WORLD_SIZE, Batch, Check, Observation
from harness.conformance.judge import Conclusion, conclude, conclude_lost
from harness.engine.wire import Job, JobOutcome
from harness.errors import HarnessError

PROGRAM = "harness.worker.conformance.main"
MAX_LOST = 8  # checks that may take a job down before the rest is given up

# A check takes about 6 ms on two busy cores; a rank that waits for ever must not cost more than a minute.
_BASE_DEADLINE_S = 45.0
_DEADLINE_PER_CHECK_S = 0.1


class RanksFailed(HarnessError):
    """The ranks failed before, or outside of, any check: the machine or an injection is at fault."""


class Engine(Protocol):
    """Runs jobs on fresh ranks."""

    def run(self, job: Job) -> JobOutcome:
        """Run one job to its end; never raises for what ranks do."""


def run_checks(engine: Engine, checks: Sequence[Check], injections: Sequence[str] = ()) -> list[Conclusion]:
    """Ask every check and judge it, in order. RanksFailed when no check is at fault."""
    lost: dict[str, Conclusion] = {}
    while True:
        asked = [check for check in checks if check.id not in lost]
        if not asked:
            return [lost[check.id] for check in checks]
        outcome = _submit(engine, Batch(checks=tuple(asked), injections=tuple(injections)))
        if outcome.status == "ok":
            judged = {check.id: conclude(check, seen) for check, seen in zip(asked, _seen(outcome), strict=True)}
            return [lost.get(check.id) or judged[check.id] for check in checks]
        culprit = _culprit(outcome, asked)
        if culprit is None:
            raise RanksFailed(f"the ranks could not run: {outcome.message}", where="conformance")
        lost[culprit.id] = conclude_lost(culprit, f"{outcome.status}: {outcome.message}")
        if len(lost) > MAX_LOST:
            message = f"never asked: {MAX_LOST} other checks took their ranks down"
            lost |= {check.id: conclude_lost(check, message) for check in asked if check.id not in lost}


def _submit(engine: Engine, batch: Batch) -> JobOutcome:
    with tempfile.TemporaryDirectory(prefix="fp8-conformance-") as folder:
        return engine.run(
            Job(
                job_id="conformance",
                world_size=WORLD_SIZE,
                payload=msgspec.msgpack.encode(batch),
                deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(batch.checks),
                folder=folder,
            )
        )


def _seen(outcome: JobOutcome) -> list[tuple[Observation, ...]]:
    """What all ranks saw, check by check."""
    ranks = [msgspec.msgpack.decode(rank.payload or b"", type=list[Observation]) for rank in outcome.ranks]
    return list(zip(*ranks, strict=True))


def _culprit(outcome: JobOutcome, asked: Sequence[Check]) -> Check | None:
    """The check that the first failing rank was at; None when it was at none."""
    phases = [rank.phase for rank in sorted(outcome.ranks, key=lambda rank: rank.consequence)]
    by_id = {check.id: check for check in asked}
    return next((by_id[phase] for phase in phases if phase in by_id), None)
