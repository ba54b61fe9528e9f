"""Two nodes in one process: a job is split, its parts start, end and fail together, and a lost node costs its jobs."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from harness.engine.cluster import Cluster
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import NodeCapacity
from harness.engine.leases import Leases
from harness.engine.messages import Job, JobOutcome, RankOutcome, Share, ShareEvent, ShareOutcome
from harness.engine.node import LocalNode, Node, NodeLost, Reservation
from harness.engine.processes import StoreProcess
from harness.errors import HarnessError
from tests.worker.processes import nothing_is_left, wait_until

__all__ = ["nothing_is_left"]  # after every test

TOY = "tests.worker.toyprogram"
STORE = "tests.worker.storeprogram"
SLOTS = {"a": 3, "b": 2}  # so a job of 4 or 5 ranks is on both, the first 3 on `a`
DEADLINE_S = 0.8


class LosableNode:
    """A node that is gone once `lose` was called, like one whose machine has lost its power."""

    def __init__(self, node: LocalNode) -> None:
        self.name, self.capacity = node.name, node.capacity
        self._node = node
        self._gone = threading.Event()

    def lose(self) -> None:
        self._gone.set()
        self._node.close()

    def _check(self) -> None:
        if self._gone.is_set():
            raise NodeLost(f"node {self.name} is gone.")

    def reserve(self, job_id: str, count: int) -> Reservation:
        self._check()
        return self._node.reserve(job_id, count)

    def warm(self, preload: Mapping[str, str]) -> None:
        self._check()
        self._node.warm(preload)

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        outcome = self._node.run(share, report)
        self._check()
        return outcome

    def end(self, job_id: str) -> None:
        self._check()
        self._node.end(job_id)

    def release(self, job_id: str) -> None:
        self._check()
        self._node.release(job_id)

    def free(self, job_id: str) -> None:
        self._check()
        self._node.free(job_id)

    def close(self) -> None:
        self._node.close()


def local_node(name: str, slots: int, folder: Path, logs: Path | None = None) -> LocalNode:
    capacity = NodeCapacity(host=name, slots=slots, device="cpu", device_name="cpu")
    leases = Leases(folder / f"leases-{name}", slots)
    return LocalNode(lambda preload: ForkServerEngine(TOY, preload), leases, capacity, logs=logs)


def open_cluster(folder: Path, nodes: list[Node] | None = None) -> Cluster:
    return Cluster(nodes or [local_node(name, slots, folder) for name, slots in SLOTS.items()], StoreProcess(STORE))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with open_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.run(job({}))
        yield cluster


def job(ways: dict[str, str], *, ranks: int = 5, deadline_s: float = 20.0, one_node: bool = False) -> Job:
    payload = json.dumps(ways).encode()
    return Job(job_id="toy", world_size=ranks, payload=payload, deadline_s=deadline_s, one_node=one_node)


def sleeping(cluster: Cluster, change: Callable[[], None], *, way: str = "sleep", file: str = "") -> JobOutcome:
    """The outcome of a job of both nodes whose ranks sleep, and something changes when all of them run."""

    def change_later() -> None:
        me = psutil.Process()
        ranks = sum(SLOTS.values())
        wait_until(lambda: sum(child.ppid() != me.pid for child in me.children(recursive=True)) >= ranks, 30)
        time.sleep(0.1)
        change()

    changing = threading.Thread(target=change_later, daemon=True)
    changing.start()
    outcome = cluster.run(job({"*": way, "file": file}))
    changing.join(5)
    return outcome


def test_a_job_is_split_over_nodes_and_ranks_know_their_place(cluster: Cluster) -> None:
    outcome = cluster.run(job({"*": "tell_place"}))
    assert (outcome.status, outcome.job_id, [rank.rank for rank in outcome.ranks]) == ("ok", "toy", [*range(5)])
    local, addresses = zip(*((rank.payload or b"").decode().split() for rank in outcome.ranks), strict=True)
    assert local == ("0", "1", "2", "0", "1")
    (address,) = set(addresses)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:4711/\d{4}-toy", address)


def test_what_fits_on_one_node_is_there_alone(cluster: Cluster) -> None:
    outcome = cluster.run(job({"*": "tell_place"}, ranks=3))
    assert [rank.payload for rank in outcome.ranks] == [b"0 file", b"1 file", b"2 file"]


@pytest.mark.parametrize(("ranks", "one_node"), [(6, False), (4, True)])
def test_a_job_that_no_nodes_can_hold_is_refused_at_once(cluster: Cluster, ranks: int, *, one_node: bool) -> None:
    with pytest.raises(HarnessError, match=f"needs {ranks} slots"):
        cluster.run(job({}, ranks=ranks, one_node=one_node))


def test_ranks_live_until_all_have_returned_on_every_node(cluster: Cluster, tmp_path: Path) -> None:
    ways = {"file": str(tmp_path / "pid"), "0": "write_pid", "4": "is_peer_alive"}
    assert cluster.run(job(ways)).ranks[4].payload == b"True"


@pytest.mark.parametrize("culprit", [0, 4])
def test_a_death_on_one_node_ends_the_other_within_a_second(cluster: Cluster, culprit: int) -> None:
    outcome = cluster.run(job({str(culprit): "sigkill", "*": "sleep"}))
    assert (outcome.status, outcome.message.split(":")[0]) == ("infra", f"rank {culprit} in 'doing sigkill'")
    assert [attempt.message for attempt in outcome.earlier] == [outcome.message]
    assert outcome.detected_s is not None
    assert outcome.wall_s < outcome.detected_s + 1.0
    for rank in outcome.ranks:
        assert rank.consequence == (rank.rank != culprit)
        assert rank.status == ("stuck" if rank.rank != culprit else "signaled")
        assert ("in _sleep" in rank.traceback) == (rank.rank != culprit)


def test_a_node_whose_ranks_have_returned_does_not_wait_for_one_that_fails(cluster: Cluster) -> None:
    outcome = cluster.run(job({"4": "raise_later"}))
    assert (outcome.status, outcome.wall_s < 3) == ("crash", True)
    assert [rank.status for rank in outcome.ranks] == ["returned"] * 4 + ["raised"]


def test_a_hang_shows_the_stacks_of_all_nodes(cluster: Cluster) -> None:
    outcome = cluster.run(job({"1": "return", "*": "sleep"}, deadline_s=DEADLINE_S))
    assert outcome.status == "hang"
    assert outcome.message.endswith("1 of 5 ranks had returned")
    stuck = [rank for rank in outcome.ranks if rank.rank != 1]
    assert all((rank.status, rank.consequence) == ("stuck", False) for rank in stuck)
    assert all("in _sleep" in rank.traceback for rank in stuck)
    assert outcome.wall_s < DEADLINE_S + 2


def test_a_job_whose_fork_server_died_on_one_node_runs_again_on_others_of_its_own(tmp_path: Path) -> None:
    def fork_servers() -> list[psutil.Process]:
        return sorted((child for child in psutil.Process().children() if TOY in child.cmdline()), key=lambda it: it.pid)

    def kill_and_go_on() -> None:
        fork_servers()[-1].kill()
        (tmp_path / "go on").touch()

    with open_cluster(tmp_path) as mine:
        assert mine.run(job({})).status == "ok"
        before = set(fork_servers())
        outcome = sleeping(mine, kill_and_go_on, way="wait_for_file", file=str(tmp_path / "go on"))
        assert outcome.status == "ok"
        (lost,) = outcome.earlier
        assert (lost.status, lost.fork_server_lost) == ("infra", True)
        assert "the fork server died: killed by SIGKILL" in lost.message
        assert lost.wall_s < 2
        assert set(fork_servers()) < before, "those of its own have ended with the job"
        assert mine.run(job({})).status == "ok"


class WithoutPython(ForkServerEngine):
    """Starts its fork server after all others, with a Python that is not there."""

    def warm(self) -> None:
        return

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            return super().run(share, report)


def test_a_node_that_cannot_start_ranks_ends_the_job_on_the_other(tmp_path: Path) -> None:
    broken = LocalNode(
        lambda preload: WithoutPython(TOY, preload),
        Leases(tmp_path / "leases", 2),
        NodeCapacity(host="b", slots=2, device="cpu", device_name="cpu"),
    )
    with open_cluster(tmp_path, [local_node("a", 3, tmp_path), broken]) as mine:
        outcome = mine.run(job({"*": "sleep"}))
    assert (outcome.status, "/no/such/python" in outcome.message) == ("infra", True)
    assert outcome.wall_s < 2
    assert {rank.consequence for rank in outcome.ranks} <= {True}


def test_ranks_of_another_node_may_still_report_their_own_failure(cluster: Cluster) -> None:
    outcome = cluster.run(job({"*": "raise"}))
    assert (outcome.status, {rank.status for rank in outcome.ranks}) == ("crash", {"raised"})


class LateNode(LosableNode):
    """A node that takes a while to start ranks."""

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        time.sleep(0.5)
        return super().run(share, report)


def test_ranks_that_start_after_the_failure_are_ended_too(tmp_path: Path) -> None:
    with open_cluster(tmp_path, [local_node("a", 3, tmp_path), LateNode(local_node("b", 2, tmp_path))]) as mine:
        mine.run(job({}))
        began_s = time.monotonic()
        outcome = mine.run(job({"0": "raise", "*": "sleep"}))
    assert (outcome.status, outcome.message) == ("crash", "rank 0 in 'doing raise': ValueError: rank 0 has a problem")
    assert time.monotonic() - began_s < 10


def test_a_lost_node_costs_its_jobs_and_nothing_else(tmp_path: Path) -> None:
    nodes = [LosableNode(local_node(name, slots, tmp_path)) for name, slots in SLOTS.items()]
    with open_cluster(tmp_path, [*nodes]) as mine:
        outcome = sleeping(mine, nodes[1].lose)
        assert (outcome.status, outcome.ranks) == ("infra", ())
        assert [attempt.message for attempt in outcome.earlier] == ["node b is gone."]
        assert mine.run(job({}, ranks=3)).status == "ok"
        later = mine.run(job({}))
        assert later.status == "infra"
        assert later.message == "needs 5 slots, but there are only 3. Lost: node b is gone."


def test_closing_ends_all_parts_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    mine = open_cluster(tmp_path, [local_node(name, slots, tmp_path) for name, slots in SLOTS.items()])
    before = set(psutil.Process().children())
    outcome = sleeping(mine, mine.close, way="children_then_sleep")
    assert (outcome.status, outcome.message) == ("infra", "the engine was closed")
    assert mine.run(job({})).message == "the engine is closed"
    assert set(psutil.Process().children()) <= before
    assert list(temporary.iterdir()) == []


def test_folders_are_removed_unless_logs_are_kept(tmp_path: Path) -> None:
    with Cluster([local_node("a", 2, tmp_path, logs=tmp_path / "logs")]) as mine:
        mine.run(job({"*": "print"}, ranks=2))
        mine.run(job({"*": "print"}, ranks=2))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["0001-toy", "0002-toy"]
    assert "to stdout" in (tmp_path / "logs" / "0001-toy" / "rank1.log").read_text()


def test_ranks_get_the_devices_that_were_leased(tmp_path: Path) -> None:
    shares: list[Share] = []

    class Recording(ForkServerEngine):
        """Starts nothing."""

        def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
            shares.append(share)
            return ShareOutcome(ranks=tuple(RankOutcome(rank=rank, status="returned") for rank in share.ranks))

    capacity = NodeCapacity(host="gpus", slots=4, device="cuda", device_name="NVIDIA H200")
    leases = Leases(tmp_path / "leases", 4)
    with Cluster([LocalNode(lambda _: Recording(TOY), leases, capacity)]) as mine, leases.acquire(1) as others:
        assert mine.run(job({}, ranks=2)).status == "ok"
    assert others == (0,), "another process holds the first device"
    assert shares[0].devices == (1, 2)
    assert not Path(shares[0].folder).exists()


def test_a_store_that_does_not_start_is_infra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP8_TEST_BROKEN_STORE", "1")
    with open_cluster(tmp_path) as mine:
        began_s = time.monotonic()
        outcome = mine.run(job({}))
    assert (outcome.status, "no such port" in outcome.message) == ("infra", True)
    assert time.monotonic() - began_s < 10
