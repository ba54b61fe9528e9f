"""Running a job as its one share, on what starts ranks on this machine and without the layers above it."""

from pathlib import Path

import msgspec

from harness.engine.hardware import Capacity, NodeCapacity
from harness.engine.messages import Job, JobOutcome, Share
from harness.engine.node import Runner
from harness.engine.outcome import conclude
from harness.request import RunRequest
from harness.trace import RankTrace


def make_share(
    folder: Path,
    world_size: int,
    payload: bytes = b"",
    *,
    deadline_s: float = 60.0,
    devices: tuple[int, ...] = (),
) -> Share:
    """All of a job, in this folder."""
    job = Job(job_id=f"toy in {folder}", world_size=world_size, payload=payload, deadline_s=deadline_s)
    return Share(job=job, count=world_size, devices=devices, folder=str(folder))


def run_alone(runner: Runner, share: Share) -> JobOutcome:
    """The outcome of a job that is one share."""
    return conclude(share.job, [runner.run(share, lambda _: None)])


def run_request(runner: Runner, folder: Path, request: RunRequest, *, deadline_s: float = 120.0) -> JobOutcome:
    """The outcome of a case on real ranks, whatever it is."""
    payload = msgspec.msgpack.encode(request)
    return run_alone(runner, make_share(folder, request.world_size, payload, deadline_s=deadline_s))


def traces_of(outcome: JobOutcome) -> tuple[RankTrace, ...]:
    """The trace of every rank; a job that did not end well fails the test."""
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback if outcome.ranks else ''}"
    return tuple(msgspec.msgpack.decode(rank.payload or b"", type=RankTrace) for rank in outcome.ranks)


def make_capacity(*slots: int) -> Capacity:
    """CPU nodes with so many slots."""
    nodes = [
        NodeCapacity(host=f"node{number}", slots=count, device="cpu", device_name="cpu")
        for number, count in enumerate(slots)
    ]
    return Capacity(nodes=tuple(nodes))
