"""The pure parts of the engine: messages in a stream, outcomes of jobs from those of ranks, and what is tried again."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.messages import (
    FrameReader,
    FromRank,
    Job,
    JobOutcome,
    JobStatus,
    PhaseReached,
    ProtocolError,
    Raised,
    RankOutcome,
    RankStatus,
    Returned,
    ShareOutcome,
    encode_frame,
)
from harness.engine.outcome import DEATH_LEAD_S, conclude, describe_exit, first_failure, run_with_retries
from harness.engine.processes import child_environ
from harness.engine.rank import one_line

MESSAGES = st.one_of(
    st.builds(PhaseReached, phase=st.text()),
    st.builds(Returned, at_s=st.floats(allow_nan=False), payload=st.binary()),
    st.builds(Raised, at_s=st.floats(allow_nan=False), message=st.text(), traceback=st.text()),
)


def make_rank(rank: int, status: RankStatus, seconds: float = 1.0) -> RankOutcome:
    return RankOutcome(rank=rank, status=status, payload=b"x", message=f"{status}!", phase="step 3", seconds=seconds)


def judge(*ranks: RankOutcome, hung: bool = False, infra: str = "") -> JobOutcome:
    job = Job(job_id="job", world_size=len(ranks), payload=b"", deadline_s=5)
    return conclude(job, [ShareOutcome(ranks=ranks, hung=hung, infra=infra)])


@given(st.lists(MESSAGES), st.data())
def test_frames_survive_any_split(messages: list[FromRank], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    reader: FrameReader[FromRank] = FrameReader(FromRank)
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [message for piece in pieces for message in reader.feed(piece)] == messages


@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error_or_waits(garbage: bytes) -> None:
    reader: FrameReader[FromRank] = FrameReader(FromRank)
    try:
        list(reader.feed(garbage))
    except ProtocolError:
        return


def test_messages_before_garbage_are_read() -> None:
    reader: FrameReader[FromRank] = FrameReader(FromRank)
    stream = reader.feed(encode_frame(PhaseReached(phase="step 1")) + b"\xff\xff\xff\xff")
    assert next(stream) == PhaseReached(phase="step 1")
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        next(stream)


def test_first_in_time_is_the_cause_in_a_hang_nobody_and_infra_outranks_everything() -> None:
    outcome = judge(make_rank(1, "returned"), make_rank(0, "returned"))
    assert (outcome.status, outcome.message) == ("ok", "")
    assert [rank.rank for rank in outcome.ranks] == [0, 1]
    outcome = judge(make_rank(0, "raised", 2.0), make_rank(1, "raised", 1.0), make_rank(2, "stuck", 0.5))
    assert (outcome.status, outcome.message) == ("crash", "rank 1 in 'step 3': raised!")
    assert [rank.consequence for rank in outcome.ranks] == [True, False, True]
    outcome = judge(make_rank(0, "stuck"), make_rank(1, "stuck"), make_rank(2, "returned"), hung=True)
    assert outcome.status == "hang"
    assert [rank.message for rank in outcome.ranks[:2]] == ["did not finish within 5 s"] * 2
    assert "rank 0 in 'step 3' stuck, rank 1 in 'step 3' stuck; 1 of 3 ranks had returned" in outcome.message
    assert [rank.consequence for rank in outcome.ranks] == [False, False, False]
    outcome = judge(make_rank(0, "raised"), make_rank(1, "stuck"), make_rank(2, "returned"), infra="could not fork")
    assert (outcome.status, outcome.message) == ("infra", "could not fork")
    assert [rank.consequence for rank in outcome.ranks] == [True, True, False]


def test_a_death_outranks_a_raise_just_before_it() -> None:
    raised = make_rank(0, "raised", 1.0)
    for status in ("exited", "signaled"):
        assert first_failure((raised, make_rank(1, status, 1.0 + 0.9 * DEATH_LEAD_S))) != raised
        assert first_failure((raised, make_rank(1, status, 1.0 + 1.1 * DEATH_LEAD_S))) == raised


def test_shares_are_joined_and_missing_ranks_are_never_ok() -> None:
    job = Job(job_id="job", world_size=3, payload=b"", deadline_s=5)
    first = ShareOutcome(ranks=(make_rank(1, "raised", 2.0), make_rank(0, "returned")), wall_s=3, cpu_s=1, detected_s=2)
    second = ShareOutcome(ranks=(make_rank(2, "signaled", 1.0),), wall_s=2, cpu_s=2, detected_s=1)
    outcome = conclude(job, [first, second])
    assert (outcome.status, outcome.wall_s, outcome.cpu_s, outcome.detected_s) == ("crash", 3, 3, 1)
    assert [(rank.rank, rank.consequence) for rank in outcome.ranks] == [(0, False), (1, True), (2, False)]
    job = Job(job_id="job", world_size=3, payload=b"", deadline_s=5)
    outcome = conclude(job, [ShareOutcome(ranks=(make_rank(0, "returned"), make_rank(1, "returned"))), ShareOutcome()])
    assert (outcome.status, outcome.message) == ("infra", "only 2 of 3 ranks were started")


@given(st.lists(st.sampled_from(["returned", "raised", "exited", "signaled", "stuck", "stopped"]), min_size=1))
def test_every_failure_has_a_culprit_and_no_failure_has_a_payload(statuses: list[RankStatus]) -> None:
    outcome = judge(*(make_rank(rank, status) for rank, status in enumerate(statuses)))
    failed = [rank for rank in outcome.ranks if rank.status != "returned"]
    assert (outcome.status == "ok") == (not failed)
    assert all(rank.payload is None for rank in failed)
    assert not failed or any(not rank.consequence for rank in failed)


def test_exits_are_described() -> None:
    assert describe_exit(0, returned=False, oom_kills=0) == ("exited", "exited with code 0 without a result")
    assert describe_exit(-11, returned=True, oom_kills=0)[1] == "killed by SIGSEGV after it had returned its result"
    assert "The OOM killer killed 2 processes during" in describe_exit(-9, returned=False, oom_kills=2)[1]
    assert describe_exit(-7, returned=False, oom_kills=2)[1] == (
        "killed by SIGBUS, not by the harness: possibly a full disk, TMPDIR or /dev/shm, or memory that fails"
    )
    assert describe_exit(-40, returned=False, oom_kills=0)[1] == "killed by signal 40"


def test_exceptions_become_one_line() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert one_line(Broken()) == "Broken: <str() raised RuntimeError>"


def test_ranks_speak_utf8_whatever_the_locale_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    says = "import locale; print(locale.getpreferredencoding(False))"
    done = subprocess.run(
        [sys.executable, "-c", says], env=child_environ({}), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().lower() == "utf-8"


def ending(status: JobStatus, *, fork_server_lost: bool = False, out_of_memory: bool = False) -> JobOutcome:
    message = "" if status == "ok" else f"{status}!"
    return JobOutcome(
        job_id="j",
        status=status,
        ranks=(),
        message=message,
        fork_server_lost=fork_server_lost,
        out_of_memory=out_of_memory,
    )


OK, CRASH, INFRA = ending("ok"), ending("crash"), ending("infra")
LOST = ending("infra", fork_server_lost=True)
KILLED = ending("infra", fork_server_lost=True, out_of_memory=True)


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
        ([LOST, INFRA, OK], "ok", [False, True, True]),  # a neighbor that has bad luck besides
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
