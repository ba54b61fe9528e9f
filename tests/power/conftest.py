"""One executor for the eager runs of this folder, on the fork servers that all tests share."""

from collections.abc import Iterator

import pytest

from harness.engine.cluster import Cluster
from harness.engine.hardware import open_leases
from harness.engine.node import LocalNode
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from tests.fork_servers import ForkServers


@pytest.fixture(scope="session")
def executor(fork_servers: ForkServers) -> Iterator[Executor]:
    plan, project = make_plan(device="cpu"), find_project()
    (here,) = plan.capacity.nodes
    leases = open_leases(project.lease_folder(), "cpu", here.slots, print)
    node = LocalNode(lambda options: fork_servers.lend(plan.program, options), leases, here, logs=plan.logs)
    with Executor(plan, Cluster([node]), project.root) as opened:
        yield opened
