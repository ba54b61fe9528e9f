"""Nodes that find each other over TCP: two launchers on one machine, whose ranks run a toy program without torch."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.engine.capacity import capacity_here
from harness.engine.cluster import Cluster
from harness.engine.joining import Rendezvous, gather, join
from harness.engine.leases import Leases
from harness.engine.messages import Job, JobOutcome
from harness.engine.node import LocalNode, Runner
from harness.engine.remote import RemoteNode
from harness.engine.storeprocess import StoreProcess
from harness.engine.torchrun import TorchrunEngine
from harness.engine.zygote_engine import ZygoteEngine
from harness.errors import HarnessError
from tests.worker.processes import start_python

TOY = "tests.worker.toyprogram"
SLOTS = 2  # of every node
FACTS = {"torch": "2.13.0"}
# A controller that gathers one node, starts a job on both and is then killed.
CONTROLLER = """
import sys
from pathlib import Path
from tests.worker.test_remote_nodes import local_node, rendezvous, run_job, ZygoteEngine, FACTS, gather
port, folder = int(sys.argv[1]), Path(sys.argv[2])
run_job(local_node(ZygoteEngine, folder), gather(rendezvous(port, 0), FACTS), {"*": "sleep"})
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def rendezvous(port: int, node_rank: int, *, timeout_s: float = 20.0) -> Rendezvous:
    return Rendezvous(nnodes=2, node_rank=node_rank, endpoint=f"127.0.0.1:{port}", timeout_s=timeout_s)


def local_node(engine: Callable[..., Runner], folder: Path) -> LocalNode:
    node = LocalNode(
        lambda options: engine(TOY, options), Leases(folder / "leases", SLOTS), capacity_here("cpu", SLOTS), logs=folder
    )
    node.name = "node 0"  # its ranks come first
    return node


def run_job(
    mine: LocalNode, others: tuple[RemoteNode, ...], ways: dict[str, str], *, deadline_s: float = 60.0
) -> JobOutcome:
    """The outcome of one job on all slots of all nodes, whose ranks never meet."""
    store = StoreProcess("tests.worker.storeprogram")
    job = Job(job_id="toy", world_size=2 * SLOTS, payload=json.dumps(ways).encode(), deadline_s=deadline_s)
    with Cluster([mine, *others], store) as cluster:
        return cluster.run(job)


class Pair:
    """A controller, and one node in another thread that serves it."""

    def __init__(self, folder: Path, engine: Callable[..., Runner]) -> None:
        port = free_port()
        self.threads = ThreadPoolExecutor(1)
        self.mine, self.other = local_node(engine, folder / "0"), local_node(engine, folder / "1")
        self.served: Future[int] = self.threads.submit(join, rendezvous(port, 1), self.other, FACTS)
        self.others = gather(rendezvous(port, 0), FACTS)

    def run(self, ways: dict[str, str], *, deadline_s: float = 60.0) -> JobOutcome:
        return run_job(self.mine, self.others, ways, deadline_s=deadline_s)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(engine: Callable[..., Runner] = ZygoteEngine) -> Pair:
        made.append(Pair(tmp_path, engine))
        return made[0]

    yield make
    for each in made:
        each.mine.close()
        for node in each.others:
            node.leave()
        each.threads.shutdown()


def test_a_job_is_split_and_the_other_node_ends_as_the_run_does(pair: Callable[..., Pair]) -> None:
    nodes = pair()
    nodes.others[0].leave(3)
    assert nodes.served.result(5) == 3
    assert nodes.others[0].name.startswith("node 1 (")


@pytest.mark.parametrize("engine", [ZygoteEngine, TorchrunEngine])
def test_results_of_all_ranks_reach_the_controller(pair: Callable[..., Pair], engine: Callable[..., Runner]) -> None:
    outcome = pair(engine).run({})
    assert (outcome.status, outcome.message) == ("ok", "")
    assert [rank.payload for rank in outcome.ranks] == [f"{rank}/4/None".encode() for rank in range(4)]


@pytest.mark.parametrize(("engine", "culprit"), [(ZygoteEngine, "1"), (ZygoteEngine, "2"), (TorchrunEngine, "1")])
def test_a_failure_on_one_node_ends_the_other_at_once(
    pair: Callable[..., Pair], engine: Callable[..., Runner], culprit: str
) -> None:
    began_s = time.monotonic()
    outcome = pair(engine).run({culprit: "raise", "*": "sleep"}, deadline_s=120)
    assert (outcome.status, outcome.message) == (
        "crash",
        f"rank {culprit} in 'doing raise': ValueError: rank {culprit} has a problem",
    )
    assert [str(rank.rank) for rank in outcome.ranks if not rank.consequence] == [culprit]
    assert time.monotonic() - began_s < 60


def test_a_node_that_dies_makes_its_jobs_infra(pair: Callable[..., Pair]) -> None:
    nodes = pair()
    threading.Timer(1.0, nodes.others[0].leave).start()
    outcome = nodes.run({"*": "sleep"})
    assert outcome.status == "infra"
    assert "node 1 (" in outcome.message and "was lost" in outcome.message
    with pytest.raises(HarnessError, match="node 0 is gone before the run was over"):
        nodes.served.result(10)


def test_a_controller_that_dies_ends_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    port = free_port()
    controller = start_python("-c", CONTROLLER, str(port), str(tmp_path / "0"))
    node = local_node(ZygoteEngine, tmp_path / "1")
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(join, rendezvous(port, 1, timeout_s=60), node, FACTS)
        while not list((tmp_path / "1").glob("*/rank3.log")):
            assert not served.done(), served.exception()
            time.sleep(0.05)
        controller.kill()
        controller.wait()
        with pytest.raises(HarnessError, match="node 0 is gone"):
            served.result(10)


def test_a_node_that_never_comes_is_named() -> None:
    port = free_port()
    with pytest.raises(HarnessError, match=r"1 of 2 nodes did not come within 0.1 s: node rank 1\."):
        gather(rendezvous(port, 0, timeout_s=0.1), FACTS)


def test_a_controller_that_never_comes_is_told(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"nobody answered within 0\.1 s"):
        join(rendezvous(free_port(), 1, timeout_s=0.1), local_node(ZygoteEngine, tmp_path), FACTS)


@pytest.mark.parametrize(
    ("node_rank", "facts", "told"),
    [(1, {"torch": "2.12.0"}, r"torch: 2\.12\.0, not 2\.13\.0"), (2, FACTS, "is not expected: there are 2")],
)
def test_a_node_that_does_not_fit_is_refused_on_both_sides(
    tmp_path: Path, node_rank: int, facts: dict[str, str], told: str
) -> None:
    port = free_port()
    node = local_node(ZygoteEngine, tmp_path)
    other = replace(rendezvous(port, 1), node_rank=node_rank)
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(join, other, node, facts)
        with pytest.raises(HarnessError, match=told):
            gather(rendezvous(port, 0), FACTS)
        with pytest.raises(HarnessError, match=told):
            served.result(5)


def test_a_stranger_at_the_port_does_no_harm() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(gather, rendezvous(port, 0, timeout_s=1), FACTS)
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(HarnessError, match="did not come within 1 s"):
            gathered.result(15)


@pytest.mark.parametrize("endpoint", ["node-0", "node-0:", ":29400", "node-0:0", "node-0:99999", ""])
def test_an_endpoint_has_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(HarnessError, match=r"is no HOST:PORT"):
        replace(rendezvous(1, 0), endpoint=endpoint).address  # noqa: B018
