"""How a job ended, from how its ranks ended: which failure came first, which it caused, and whether it is tried again.

Functions on values: `supervisor.py`, or the torchrun of a plug-in, watches the processes. Every run of ranks comes
through `run_with_retries`, whatever asks for it, which tries again what the machine ended.

What ranks did themselves is never tried again until it passes. A fork server serves several jobs, and its death ends
all of them: each is tried again on its own fork server, so that a job which kills its server does not harm others.
"""

import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from harness.engine.messages import Job, JobOutcome, JobStatus, RankOutcome, RankStatus, ShareOutcome
from harness.engine.symptoms import MACHINE_SIGNALS, Reading, order_of, read

# A dying rank closes its sockets before the kernel reports its death, so a peer may already have raised "connection
# closed". A rank that raises keeps its sockets open and cannot bring a peer down. So a death counts as the cause of a
# raise that is less than this much older.
DEATH_LEAD_S = 0.1


def describe_exit(returncode: int, *, returned: bool, oom_kills: int) -> tuple[RankStatus, str]:
    """Return the status and message of a rank that exited on its own. `returncode` as in subprocess: -N is signal N.

    `oom_kills` is how many processes the kernel's OOM killer ended during the job.
    """
    after = " after it had returned its result" if returned else ""
    if returncode >= 0:
        return "exited", f"exited with code {returncode}{after or ' without a result'}"
    message = f"killed by {_signal_name(-returncode)}{after}"
    if -returncode not in MACHINE_SIGNALS:
        return "signaled", message
    message = f"{message}, not by the harness: possibly {MACHINE_SIGNALS[signal.Signals(-returncode)]}"
    if -returncode != signal.SIGKILL:
        return "signaled", message
    oom = f"killed {oom_kills} processes" if oom_kills else "reports no kill"
    return "signaled", f"{message}. The OOM killer {oom} during the job"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that did not return, and what its texts say of the cause."""

    rank: RankOutcome
    reading: Reading

    @property
    def order(self) -> int:
        return order_of(self.rank, self.reading)

    @property
    def with_reading(self) -> RankOutcome:
        """Return the rank, with what its output or its error means appended to its message."""
        cause = self.reading.what
        if cause in self.rank.message:
            return self.rank
        return msgspec.structs.replace(self.rank, message=f"{self.rank.message}: {cause}")


def failures_of(ranks: tuple[RankOutcome, ...], *, on_gpus: bool) -> tuple[Failure, ...]:
    """Return the ranks that did not return; what brought the job down is first.

    That is the first in time of those that are closest to the cause (`symptoms.order_of`).
    """
    failed = [Failure(rank=rank, reading=read(rank, on_gpus=on_gpus)) for rank in ranks if rank.status != "returned"]
    return tuple(sorted(failed, key=_precedence))


def first_failure(ranks: tuple[RankOutcome, ...], *, on_gpus: bool = False) -> RankOutcome | None:
    """Return the rank whose failure brought the job down; None when every rank returned."""
    return next((failure.rank for failure in failures_of(ranks, on_gpus=on_gpus)), None)


def _precedence(failure: Failure) -> tuple[int, float, int]:
    rank = failure.rank
    lead_s = DEATH_LEAD_S if rank.status in ("exited", "signaled") else 0.0
    return failure.order, rank.seconds - lead_s, rank.rank


def conclude(job: Job, shares: Sequence[ShareOutcome], *, on_gpus: bool = False) -> JobOutcome:
    """Return the outcome of a job. Marks every failed rank that another failure brought down as a consequence.

    Where the harness itself failed, such as by the loss of a node, no rank is the cause. A broken GPU, or one whose
    memory others hold, makes it `infra` too; a collective that times out is a `hang`.
    """
    hung = any(share.hung for share in shares)
    ended = (_with_limit(rank, job) if hung else rank for share in shares for rank in share.ranks)
    ranks = tuple(sorted(ended, key=lambda rank: rank.rank))
    failures = failures_of(ranks, on_gpus=on_gpus)
    infra = next((share.infra for share in shares if share.infra), "")
    if not infra and not failures and len(ranks) < job.world_size:
        infra = f"only {len(ranks)} of {job.world_size} ranks were started"
    causes = {} if infra else {failure.rank.rank: failure.with_reading for failure in _causes(failures)}
    return JobOutcome(
        job_id=job.job_id,
        status="infra" if infra else _status(failures, hung=hung),
        ranks=tuple(_marked(rank, causes) for rank in ranks),
        message=infra or _message(job, ranks, failures, hung=hung),
        wall_s=max(share.wall_s for share in shares),
        cpu_s=sum(share.cpu_s for share in shares),
        detected_s=min((share.detected_s for share in shares if share.detected_s is not None), default=None),
        fork_server_lost=any(share.fork_server_lost for share in shares),
        out_of_memory=any(share.out_of_memory for share in shares),
    )


def _causes(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Return the first failure, and those beside it of which none was first: all stuck, say, or all that timed out."""
    if not failures:
        return ()
    first = failures[0]
    if first.reading.kind == "timeout":
        return tuple(
            failure for failure in failures if failure.reading.kind == "timeout" or failure.rank.status == "stuck"
        )
    together = first.reading.kind == "machine" or first.rank.status in ("stuck", "stopped")
    return tuple(failure for failure in failures if failure.order == first.order) if together else (first,)


def _status(failures: tuple[Failure, ...], *, hung: bool) -> JobStatus:
    kind = failures[0].reading.kind if failures else ""
    if kind == "machine":
        return "infra"
    if hung or kind == "timeout":
        return "hang"
    return "crash" if failures else "ok"


def _with_limit(rank: RankOutcome, job: Job) -> RankOutcome:
    limit = f"did not finish within {job.deadline_s:g} s"
    return msgspec.structs.replace(rank, message=limit) if rank.status == "stuck" else rank


def _marked(rank: RankOutcome, causes: Mapping[int, RankOutcome]) -> RankOutcome:
    if rank.status == "returned":
        return rank
    return msgspec.structs.replace(causes.get(rank.rank, rank), payload=None, consequence=rank.rank not in causes)


def _where(rank: RankOutcome) -> str:
    return f"rank {rank.rank} in '{rank.phase}'" if rank.phase else f"rank {rank.rank}"


def _message(job: Job, ranks: Sequence[RankOutcome], failures: tuple[Failure, ...], *, hung: bool) -> str:
    if not failures:
        return ""
    first = failures[0].with_reading
    if failures[0].reading.kind == "timeout":
        # who waited in which collective, and who did not arrive
        waited: dict[str, list[int]] = {}
        for failure in sorted(_causes(failures), key=lambda failure: failure.rank.rank):
            does = failure.reading.what if failure.reading.kind == "timeout" else f"{failure.rank.status} elsewhere"
            waited.setdefault(does, []).append(failure.rank.rank)
        return "; ".join(
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: {state}"
            for state, ranks in waited.items()
        )
    return _hang_message(job, ranks, first) if hung else f"{_where(first)}: {first.message}"


def _hang_message(job: Job, ranks: Sequence[RankOutcome], cause: RankOutcome) -> str:
    returned = sum(rank.status == "returned" for rank in ranks)
    hanging = [rank for rank in ranks if rank.status == cause.status]
    names = ", ".join(f"{_where(rank)} {rank.status}" for rank in hanging[:4])
    more = f" and {len(hanging) - 4} more" if len(hanging) > 4 else ""
    return f"deadline of {job.deadline_s:g} s passed: {names}{more}; {returned} of {job.world_size} ranks had returned"


MACHINE_ATTEMPTS = 2  # of a job that ends as `infra`
FORK_SERVER_ATTEMPTS = 3  # of a job whose fork server was lost: the first may be the fault of another job


def run_with_retries(
    run: Callable[[bool], JobOutcome], *, closed: Callable[[], bool], note: Callable[[str], None]
) -> JobOutcome:
    """Return the outcome of the last attempt, with those before it in `earlier`.

    `run` makes one attempt; its argument says whether it needs its own fork server. `note` gets a line about every
    retry. Nothing is tried again once the engine is `closed`.
    """
    earlier: tuple[JobOutcome, ...] = ()
    while True:
        outcome = run(any(attempt.fork_server_lost for attempt in earlier))
        attempts = (*earlier, outcome)
        if outcome.status != "infra" or closed() or not _another_is_due(attempts):
            return replace(_concluded(attempts), earlier=earlier)
        note(f"infra, trying again: {outcome.job_id}: {outcome.message}")
        earlier = (*earlier, replace(outcome, ranks=()))


def _another_is_due(attempts: tuple[JobOutcome, ...]) -> bool:
    """Losing the fork server counts apart: where another job is to blame, this one still has its retry."""
    lost = sum(attempt.fork_server_lost for attempt in attempts)
    return lost < FORK_SERVER_ATTEMPTS and len(attempts) - lost < MACHINE_ATTEMPTS


def _concluded(attempts: tuple[JobOutcome, ...]) -> JobOutcome:
    """Return the last attempt; a crash if every fork server was lost, unless the kernel was out of memory."""
    last, lost = attempts[-1], [attempt for attempt in attempts if attempt.fork_server_lost]
    if not last.fork_server_lost or len(lost) < FORK_SERVER_ATTEMPTS or any(attempt.out_of_memory for attempt in lost):
        return last
    message = f"its fork server was lost {len(lost)} times, in the end with no other job on it: {last.message}"
    return replace(last, status="crash", message=message)
