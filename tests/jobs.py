"""Running a job as its one share, on what starts ranks on this machine and without the layers above it."""

from __future__ import annotations

from pathlib import Path

from harness.engine.messages import Job, JobOutcome, Share
from harness.engine.node import Runner
from harness.engine.outcome import conclude


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
