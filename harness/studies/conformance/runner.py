"""Runs checks on ranks, all in one job. A check that brings the job down is left out of the next job."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import msgspec

from harness.engine.messages import Job, JobOutcome
from harness.errors import HarnessError
from harness.running.executor import Engine
from harness.studies.conformance.judge import Conclusion, conclude, conclude_lost
from harness.trace.operator_checks import WORLD_SIZE, Batch, Observation, OperatorCheck
from harness.trace.patch import Patch

PROGRAM = "harness.worker.conformance.main"
MAX_LOST = 8  # checks that may bring a job down before the run is aborted

# A check takes about 6 ms on two busy cores. A hanging rank must not delay a small run by more than a minute.
_BASE_DEADLINE_S = 45.0
_DEADLINE_PER_CHECK_S = 0.1


class RanksFailed(HarnessError):
    """The ranks failed outside of any check, because of the machine or an injection."""


def run_checks(engine: Engine, checks: Sequence[OperatorCheck], injections: Sequence[Patch] = ()) -> list[Conclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the ranks fail outside of any check."""
    lost: dict[str, Conclusion] = {}
    while True:
        pending = [check for check in checks if check.id not in lost]
        if not pending:
            return [lost[check.id] for check in checks]
        outcome = _submit(engine, Batch(checks=tuple(pending), injections=tuple(injections)))
        if outcome.status == "ok":
            observed = zip(pending, _observations(outcome), strict=True)
            judged = {check.id: conclude(check, observations) for check, observations in observed}
            return [lost.get(check.id) or judged[check.id] for check in checks]
        culprit = _culprit(outcome, pending)
        if culprit is None:
            what = f"the ranks failed outside of any check: {outcome.message}"
            raise RanksFailed(what, where="conformance", fix="check the memory of this machine, and --inject.")
        lost[culprit.id] = conclude_lost(culprit, f"{outcome.status}: {outcome.message}")
        if len(lost) > MAX_LOST:
            message = f"not run: more than {MAX_LOST} other checks brought their ranks down"
            lost |= {check.id: conclude_lost(check, message) for check in pending if check.id not in lost}


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


def _observations(outcome: JobOutcome) -> list[tuple[Observation, ...]]:
    """The observations of all ranks, by check."""
    ranks = [msgspec.msgpack.decode(rank.payload or b"", type=list[Observation]) for rank in outcome.ranks]
    return list(zip(*ranks, strict=True))


def _culprit(outcome: JobOutcome, checks: Sequence[OperatorCheck]) -> OperatorCheck | None:
    """The check that the first failed rank was running; None if it was running none."""
    phases = [rank.phase for rank in sorted(outcome.ranks, key=lambda rank: rank.consequence)]
    by_id = {check.id: check for check in checks}
    return next((by_id[phase] for phase in phases if phase in by_id), None)
