"""How a job ended, from how its ranks ended: which failure came first, and which failures it caused.

Pure functions on values: `supervisor.py` and `torchrun.py` watch the processes.
"""

from __future__ import annotations

import signal

import msgspec

from harness.engine.messages import Job, JobOutcome, RankOutcome, RankStatus

# A dying rank closes its sockets before the kernel reports its death, so a peer may already have raised "connection
# closed". A rank that raises keeps its sockets open and cannot bring a peer down. So a death counts as the cause of a
# raise that is less than this much older.
DEATH_LEAD_S = 0.1


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine recorded about a job. `infra` says why the harness itself failed; empty if it did not."""

    ranks: tuple[RankOutcome, ...]
    hung: bool = False
    infra: str = ""
    wall_s: float
    cpu_s: float
    detected_s: float | None


def describe_exit(returncode: int, *, returned: bool, oom_kills: int) -> tuple[RankStatus, str]:
    """Status and message of a rank that exited on its own. `returncode` is as in subprocess: -N means signal N.

    `oom_kills` is how many processes the kernel's OOM killer ended during the job.
    """
    after = " after it had returned its result" if returned else ""
    if returncode >= 0:
        return "exited", f"exited with code {returncode}{after or ' without a result'}"
    message = f"killed by {_signal_name(-returncode)}{after}"
    if -returncode != signal.SIGKILL:
        return "signalled", message
    oom = f"it killed {oom_kills} during the job" if oom_kills else "it reports no kill during the job"
    return "signalled", f"{message}, not by the harness: possibly the kernel's OOM killer ({oom}) or another user"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(ranks: tuple[RankOutcome, ...]) -> RankOutcome | None:
    """The failure that brought the job down: the first in time, or None when every rank returned.

    Stuck and stopped ranks come after every rank that failed by itself, stuck after stopped: peers get stuck waiting
    for a stopped rank.
    """
    failures = [rank for rank in ranks if rank.status != "returned"]
    return min(failures, key=_precedence, default=None)


def _precedence(rank: RankOutcome) -> tuple[int, float, int]:
    order = {"stopped": 1, "stuck": 2}.get(rank.status, 0)
    lead_s = DEATH_LEAD_S if rank.status in ("exited", "signalled") else 0.0
    return order, rank.seconds - lead_s, rank.rank


def conclude(job: Job, record: JobRecord) -> JobOutcome:
    """Returns the outcome of a job. Marks every failed rank that another failure brought down as a consequence."""
    cause = first_failure(record.ranks)
    causes = {cause.rank} if cause else set()
    if cause and cause.status in ("stuck", "stopped"):
        causes = {rank.rank for rank in record.ranks if rank.status == cause.status}  # none of them was first
    ordered = sorted(record.ranks, key=lambda rank: rank.rank)
    return JobOutcome(
        job_id=job.job_id,
        status="infra" if record.infra else "hang" if record.hung else "crash" if cause else "ok",
        ranks=tuple(_marked(rank, causes) for rank in ordered),
        message=record.infra or (_hang_message(job, record, cause) if record.hung else _crash_message(cause)),
        wall_s=record.wall_s,
        cpu_s=record.cpu_s,
        detected_s=record.detected_s,
    )


def infra_outcome(job: Job, message: str) -> JobOutcome:
    """Returns the outcome of a job that no rank reported anything about."""
    return JobOutcome(job_id=job.job_id, status="infra", ranks=(), message=message)


def _marked(rank: RankOutcome, causes: set[int]) -> RankOutcome:
    if rank.status == "returned":
        return rank
    return msgspec.structs.replace(rank, payload=None, consequence=rank.rank not in causes)


def _where(rank: RankOutcome) -> str:
    return f"rank {rank.rank} in '{rank.phase}'" if rank.phase else f"rank {rank.rank}"


def _crash_message(cause: RankOutcome | None) -> str:
    return f"{_where(cause)}: {cause.message}" if cause else ""


def _hang_message(job: Job, record: JobRecord, cause: RankOutcome | None) -> str:
    returned = sum(rank.status == "returned" for rank in record.ranks)
    hanging = [rank for rank in record.ranks if cause and rank.status == cause.status]
    names = ", ".join(f"{_where(rank)} {rank.status}" for rank in hanging[:4])
    more = f" and {len(hanging) - 4} more" if len(hanging) > 4 else ""
    return f"deadline of {job.deadline_s:g} s passed: {names}{more}; {returned} of {job.world_size} ranks had returned"
