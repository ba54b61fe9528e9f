"""Runs checks on ranks, all in one job. A check that brings its ranks down is left out of the next job."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.errors import HarnessError

MAX_LOST = 8  # checks that may bring their ranks down before the rest is given up


class RanksFailed(HarnessError):
    """The ranks failed outside of what is checked, because of the machine or an injection."""


class Check(Protocol):
    """A check as its ranks name it: the phase that they report while they run it."""

    @property
    def id(self) -> str:
        """Return the unique id of the check."""


AnyCheck = TypeVar("AnyCheck", bound=Check)
Concluded = TypeVar("Concluded")


def run_surviving(  # noqa: PLR0913  what two studies do differently
    engine: Cluster,
    checks: Sequence[AnyCheck],
    *,
    job_of: Callable[[tuple[AnyCheck, ...]], Job],
    judge: Callable[[tuple[AnyCheck, ...], JobOutcome], Sequence[Concluded]],
    conclude_lost: Callable[[AnyCheck, str], Concluded],
    where: str,
    fix: str,
) -> list[Concluded]:
    """Return the conclusions on all checks, in order.

    `job_of` makes the job that runs some of them, `judge` concludes on those of a job that ended well, and
    `conclude_lost` on one that brought its ranks down. Raises RanksFailed, with `where` and `fix`, when ranks fail
    outside of any check.
    """
    lost: dict[str, Concluded] = {}
    while True:
        pending = tuple(check for check in checks if check.id not in lost)
        if not pending:
            return [lost[check.id] for check in checks]
        job = job_of(pending)
        outcome = engine.run(job)
        if outcome.status == "ok":
            judged = dict(zip((check.id for check in pending), judge(pending, outcome), strict=True))
            return [lost[check.id] if check.id in lost else judged[check.id] for check in checks]
        ranks = "rank" if job.world_size == 1 else "ranks"
        if outcome.status == "infra":
            raise RanksFailed(f"the machine ended the {ranks}: {outcome.message}", where=where, fix=fix)
        # The first failed rank was running it.
        phases = [rank.phase for rank in sorted(outcome.ranks, key=lambda rank: rank.consequence)]
        culprit = next((check for phase in phases for check in pending if check.id == phase), None)
        if culprit is None:
            raise RanksFailed(f"the {ranks} failed outside of any check: {outcome.message}", where=where, fix=fix)
        lost[culprit.id] = conclude_lost(culprit, f"{outcome.status}: {outcome.message}")
        if len(lost) > MAX_LOST:
            message = f"not run: more than {MAX_LOST} other checks brought their {ranks} down"
            lost |= {check.id: conclude_lost(check, message) for check in pending if check.id not in lost}
