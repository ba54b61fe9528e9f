"""What is tried again: a fault of the machine, once; a job whose zygote was lost, on one of its own."""

from __future__ import annotations

import pytest

from harness.engine.messages import JobOutcome, JobStatus
from harness.engine.outcome import run_with_retries


def ending(status: JobStatus, *, zygote_lost: bool = False, out_of_memory: bool = False) -> JobOutcome:
    message = "" if status == "ok" else f"{status}!"
    return JobOutcome(
        job_id="j", status=status, ranks=(), message=message, zygote_lost=zygote_lost, out_of_memory=out_of_memory
    )


OK, CRASH, INFRA = ending("ok"), ending("crash"), ending("infra")
LOST = ending("infra", zygote_lost=True)
KILLED = ending("infra", zygote_lost=True, out_of_memory=True)


@pytest.mark.parametrize(
    ("endings", "status", "alone"),
    [
        ([OK], "ok", [False]),
        ([CRASH], "crash", [False]),
        ([ending("hang")], "hang", [False]),
        ([INFRA, OK], "ok", [False, False]),
        ([INFRA, CRASH], "crash", [False, False]),
        ([INFRA, INFRA], "infra", [False, False]),
        ([LOST, OK], "ok", [False, True]),
        ([LOST, CRASH], "crash", [False, True]),
        ([LOST, LOST, OK], "ok", [False, True, True]),
        ([LOST, LOST, LOST], "crash", [False, True, True]),
        ([LOST, KILLED, LOST], "infra", [False, True, True]),
        ([LOST, INFRA, OK], "ok", [False, True, True]),  # a neighbour that has bad luck besides
        ([LOST, INFRA, INFRA], "infra", [False, True, True]),
        ([INFRA, LOST, OK], "ok", [False, False, True]),
    ],
    ids=str,
)
def test_attempts(endings: list[JobOutcome], status: JobStatus, alone: list[bool]) -> None:
    left, asked, notes = list(endings), list[bool](), list[str]()

    def run(alone: bool) -> JobOutcome:
        asked.append(alone)
        return left.pop(0)

    outcome = run_with_retries(run, closed=lambda: False, note=notes.append)
    assert (outcome.status, asked, left) == (status, alone, [])
    assert outcome.earlier == tuple(endings[:-1])
    assert notes == ["infra, trying again: j: infra!"] * (len(endings) - 1)


def test_a_closed_engine_tries_nothing_again() -> None:
    outcome = run_with_retries(lambda alone: LOST if alone else INFRA, closed=lambda: True, note=print)
    assert (outcome, outcome.earlier) == (INFRA, ())
