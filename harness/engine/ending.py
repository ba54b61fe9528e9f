"""How ranks end and what that makes of their job: which failure came first, which ones are consequences.

Pure: endings in, outcome out. It does not watch processes (`supervisor.py`) and reads no files.
"""

from __future__ import annotations

import signal

import msgspec

from harness.engine.wire import Job, JobOutcome, RankOutcome, RankStatus

# A rank that dies closes its sockets before the kernel reports its death, so a peer may have raised "connection
# closed" already. A rank that raises holds its sockets and cannot kill a peer. So a death outranks a raise that is
# less than this much older.
DEATH_LEAD_S = 0.1


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, `at_s` seconds after the start of its job."""

    rank: int
    status: RankStatus
    at_s: float
    payload: bytes | None = None
    message: str = ""
    traceback: str = ""
    phase: str = ""
    log_tail: str = ""


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows besides the endings. `infra` says why the harness itself failed, empty if not."""

    endings: tuple[Ending, ...]
    hung: bool = False
    infra: str = ""
    wall_s: float
    cpu_s: float
    detected_s: float | None


def describe_exit(returncode: int, *, returned: bool, oom_kills: int) -> tuple[RankStatus, str]:
    """Status and message of a rank that went without being told to. `returncode` as in subprocess: -N is signal N."""
    after = " after it had returned its result" if returned else ""
    if returncode >= 0:
        return "exited", f"exited with code {returncode}{after or ' without a result'}"
    message = f"killed by {_signal_name(-returncode)}{after}"
    if -returncode != signal.SIGKILL:
        return "signalled", message
    blame = f"it has killed {oom_kills} since this began" if oom_kills else "it reports no kill since this began"
    return "signalled", f"{message}, not by the harness: possibly the kernel's OOM killer ({blame}) or another user"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(endings: tuple[Ending, ...]) -> Ending | None:
    """The ending that brought the others down: the first failure in time, or None when every rank returned.

    A stopped rank is why its peers are stuck. Stuck and stopped ranks come after every failure that a rank showed
    by itself.
    """
    failures = [ending for ending in endings if ending.status != "returned"]
    return min(failures, key=_precedence, default=None)


def _precedence(ending: Ending) -> tuple[int, float, int]:
    order = {"stopped": 1, "stuck": 2}.get(ending.status, 0)
    lead_s = DEATH_LEAD_S if ending.status in ("exited", "signalled") else 0.0
    return order, ending.at_s - lead_s, ending.rank


def conclude(job: Job, end: JobEnd) -> JobOutcome:
    """Returns the outcome of a job from the endings of its ranks."""
    cause = first_failure(end.endings)
    blamed = {cause.rank} if cause else set()
    if cause and cause.status in ("stuck", "stopped"):
        blamed = {ending.rank for ending in end.endings if ending.status == cause.status}  # nobody was first
    ranks = tuple(_outcome(ending, blamed) for ending in sorted(end.endings, key=lambda ending: ending.rank))
    return JobOutcome(
        job_id=job.job_id,
        status="infra" if end.infra else "hang" if end.hung else "crash" if cause else "ok",
        ranks=ranks,
        message=end.infra or (_hang_message(job, end, cause) if end.hung else _crash_message(cause)),
        wall_s=end.wall_s,
        cpu_s=end.cpu_s,
        detected_s=end.detected_s,
    )


def _outcome(ending: Ending, blamed: set[int]) -> RankOutcome:
    failed = ending.status != "returned"
    return RankOutcome(
        rank=ending.rank,
        status=ending.status,
        payload=None if failed else ending.payload,
        message=ending.message,
        traceback=ending.traceback,
        phase=ending.phase,
        seconds=ending.at_s,
        consequence=failed and ending.rank not in blamed,
        log_tail=ending.log_tail,
    )


def _where(ending: Ending) -> str:
    return f"rank {ending.rank} in '{ending.phase}'" if ending.phase else f"rank {ending.rank}"


def _crash_message(cause: Ending | None) -> str:
    return f"{_where(cause)}: {cause.message}" if cause else ""


def _hang_message(job: Job, end: JobEnd, cause: Ending | None) -> str:
    returned = sum(ending.status == "returned" for ending in end.endings)
    culprits = [ending for ending in end.endings if cause and ending.status == cause.status]
    names = ", ".join(f"{_where(ending)} {ending.status}" for ending in culprits[:4])
    more = f" and {len(culprits) - 4} more" if len(culprits) > 4 else ""
    return f"deadline of {job.deadline_s:g} s passed: {names}{more}; {returned} of {job.world_size} ranks had returned"
