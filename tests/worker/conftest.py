"""The shortest ways to train a case on real ranks, from the fork servers that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import JobOutcome
from harness.matrix.case import Case
from harness.request import RunRequest
from harness.running.plan import parse_injection
from harness.trace import RankTrace, Run
from harness.trace.record import Patch
from tests.builders import run_of
from tests.fork_servers import COMPILED, EAGER, ForkServers
from tests.jobs import run_request, traces_of

Submit = Callable[..., JobOutcome]
Train = Callable[..., tuple[RankTrace, ...]]
Trained = Callable[..., Run]
Plant = Callable[..., tuple[str, ...]]


def make_request(case: Case, *, injections: Sequence[str | Patch] = (), **asked: Any) -> RunRequest:
    """The request; injections may be what a user writes."""
    patches = (
        injection if isinstance(injection, Patch) else parse_injection(injection).patch for injection in injections
    )
    return RunRequest(case=case, injections=tuple(patches), **asked)


@pytest.fixture(scope="session")
def engine(fork_servers: ForkServers) -> ForkServerEngine:
    return fork_servers.engine(EAGER)


@pytest.fixture(scope="session")
def submit(fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Submit:
    """Run a case as a job and return its outcome, whatever it is. The keywords are those of `make_request`."""

    def run(case: Case, **asked: Any) -> JobOutcome:
        request = make_request(case, **asked)
        compiles = case.compile != "none" or "graphs" in request.probes
        engine = fork_servers.engine(COMPILED if compiles else EAGER)
        return run_request(engine, tmp_path_factory.mktemp("job"), request)

    return run


@pytest.fixture(scope="session")
def train(submit: Submit) -> Train:
    """Train a case and return the trace of every rank; a case that does not finish fails the test."""
    return lambda case, **asked: traces_of(submit(case, **asked))


@pytest.fixture(scope="module")
def trained(train: Train) -> Trained:
    """The run of a case, sketched unless other probes are asked for; trained once for all tests of a file."""
    kept: dict[RunRequest, Run] = {}

    def run(case: Case, *, probes: tuple[str, ...] = ("sketches",), **asked: Any) -> Run:
        request = make_request(case, probes=probes, **asked)
        if request not in kept:
            kept[request] = run_of(*train(case, probes=probes, **asked))
        return kept[request]

    return run


@pytest.fixture(scope="session")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Plant:
    """The injections that call a function of some source in every rank, or plant a fault of the list ("fault:…")."""

    def write(source: str, name: str = "apply") -> tuple[str, ...]:
        if name.startswith("fault:"):
            return (name,)
        path = tmp_path_factory.mktemp("planted") / "planted.py"
        path.write_text(source)
        return (f"{path}:{name}",)

    return write
