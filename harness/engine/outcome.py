"""How a job ended, from how its ranks ended: which failure came first, and which failures it caused.

Pure functions on values: `supervisor.py` and `torchrun.py` watch the processes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from harness.engine.messages import Job, JobOutcome, RankOutcome, RankStatus, ShareOutcome

# A dying rank closes its sockets before the kernel reports its death, so a peer may already have raised "connection
# closed". A rank that raises keeps its sockets open and cannot bring a peer down. So a death counts as the cause of a
# raise that is less than this much older.
DEATH_LEAD_S = 0.1


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


def first_failure(ranks: Sequence[RankOutcome]) -> RankOutcome | None:
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


def conclude(job: Job, shares: Sequence[ShareOutcome]) -> JobOutcome:
    """Returns the outcome of a job. Marks every failed rank that another failure brought down as a consequence.

    Where the harness itself failed, such as by the loss of a node, no rank is the cause.
    """
    ranks = tuple(sorted((rank for share in shares for rank in share.ranks), key=lambda rank: rank.rank))
    hung = any(share.hung for share in shares)
    cause = first_failure(ranks)
    infra = next((share.infra for share in shares if share.infra), "")
    if not infra and cause is None and len(ranks) < job.world_size:
        infra = f"only {len(ranks)} of {job.world_size} ranks were started"
    causes = set() if infra else _causes(ranks, cause)
    return JobOutcome(
        job_id=job.job_id,
        status="infra" if infra else "hang" if hung else "crash" if cause else "ok",
        ranks=tuple(_marked(rank, causes) for rank in ranks),
        message=infra or (_hang_message(job, ranks, cause) if hung else _crash_message(cause)),
        wall_s=max(share.wall_s for share in shares),
        cpu_s=sum(share.cpu_s for share in shares),
        detected_s=min((share.detected_s for share in shares if share.detected_s is not None), default=None),
    )


def _causes(ranks: Sequence[RankOutcome], cause: RankOutcome | None) -> set[int]:
    """The rank that failed first; where all are stuck, none of them was first."""
    if cause is None:
        return set()
    if cause.status in ("stuck", "stopped"):
        return {rank.rank for rank in ranks if rank.status == cause.status}
    return {cause.rank}


def _marked(rank: RankOutcome, causes: set[int]) -> RankOutcome:
    if rank.status == "returned":
        return rank
    return msgspec.structs.replace(rank, payload=None, consequence=rank.rank not in causes)


def _where(rank: RankOutcome) -> str:
    return f"rank {rank.rank} in '{rank.phase}'" if rank.phase else f"rank {rank.rank}"


def _crash_message(cause: RankOutcome | None) -> str:
    return f"{_where(cause)}: {cause.message}" if cause else ""


def _hang_message(job: Job, ranks: Sequence[RankOutcome], cause: RankOutcome | None) -> str:
    returned = sum(rank.status == "returned" for rank in ranks)
    hanging = [rank for rank in ranks if cause and rank.status == cause.status]
    names = ", ".join(f"{_where(rank)} {rank.status}" for rank in hanging[:4])
    more = f" and {len(hanging) - 4} more" if len(hanging) > 4 else ""
    return f"deadline of {job.deadline_s:g} s passed: {names}{more}; {returned} of {job.world_size} ranks had returned"
