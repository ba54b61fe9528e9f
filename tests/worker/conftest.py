"""One warm process for all tests of this folder, and the shortest way to train a case on real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from harness.engine.wire import Job, JobOutcome
from harness.engine.zygote import ZygoteEngine
from harness.request import RunRequest
from harness.spec.case import Case
from harness.trace import RankTrace

DEADLINE_S = 120.0
Submit = Callable[..., JobOutcome]
Train = Callable[..., tuple[RankTrace, ...]]


@pytest.fixture(scope="session")
def engine() -> Iterator[ZygoteEngine]:
    with ZygoteEngine("harness.worker.main", {"device": "cpu", "compile": "on"}) as warm:
        yield warm


@pytest.fixture(scope="session")
def submit(engine: ZygoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Submit:
    """Run a case as a job and return its outcome, whatever it is."""
    numbers = itertools.count()

    def run(
        case: Case, *, injections: tuple[str, ...] = (), probes: tuple[str, ...] = (), solo: bool = False
    ) -> JobOutcome:
        folder: Path = tmp_path_factory.mktemp(f"job{next(numbers)}-")
        request = RunRequest(case=case, injections=injections, probes=probes, solo=solo)
        return engine.run(
            Job(
                job_id=folder.name,
                world_size=request.world_size,
                payload=msgspec.msgpack.encode(request),
                deadline_s=DEADLINE_S,
                folder=str(folder),
            )
        )

    return run


@pytest.fixture(scope="session")
def train(submit: Submit) -> Train:
    """Train a case and return the trace of every rank; a case that does not finish fails the test."""

    def run(
        case: Case, *, injections: tuple[str, ...] = (), probes: tuple[str, ...] = (), solo: bool = False
    ) -> tuple[RankTrace, ...]:
        outcome = submit(case, injections=injections, probes=probes, solo=solo)
        assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback if outcome.ranks else ''}"
        return tuple(msgspec.msgpack.decode(rank.payload or b"", type=RankTrace) for rank in outcome.ranks)

    return run
