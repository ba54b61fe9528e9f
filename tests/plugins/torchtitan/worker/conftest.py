"""Everything here needs torchtitan: `make torchtitan` installs it and runs these tests."""

from __future__ import annotations

from typing import Any

import pytest

from harness.hints import INSTALL_TORCHTITAN
from harness.matrix.case import Case
from harness.plugins.torchtitan import NAME
from harness.request import RunRequest
from harness.sources import installed_version
from harness.trace import Run
from tests.builders import run_of
from tests.fork_servers import EAGER, ForkServers
from tests.jobs import run_request, traces_of
from tests.worker.conftest import Trained, make_request


@pytest.fixture(autouse=True, scope="session")
def _torchtitan() -> None:
    if installed_version("torchtitan") is None:
        pytest.skip(f"torchtitan is not installed: {INSTALL_TORCHTITAN}")
    from harness.plugins.torchtitan.worker import preload
    from harness.worker.virtual import device

    device.install()
    preload()


@pytest.fixture(scope="session")
def trained(fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of a case, sketched unless other probes are asked for, by ranks that are forked with torchtitan imported.

    Trained once for all tests.
    """
    engine, kept = fork_servers.engine({**EAGER, "target": NAME}), dict[RunRequest, Run]()

    def run(case: Case, *, probes: tuple[str, ...] = ("sketches",), **asked: Any) -> Run:
        request = make_request(case, probes=probes, **asked)
        if request not in kept:
            kept[request] = run_of(*traces_of(run_request(engine, tmp_path_factory.mktemp("job"), request)))
        return kept[request]

    return run
