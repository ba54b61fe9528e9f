"""`--launcher ray` on a cluster whose nodes are processes of this machine: losses, other runs, refusals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from harness.errors import HarnessError
from harness.plugins.launchers import ray_connection
from harness.plugins.launchers.ray_connection import alive_machines, connect
from tests.acceptance.conftest import REPOSITORY, Command
from tests.lines import read_run, tree

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fp8-harness[cluster]'")

SMALL = {"num_cpus": 2, "object_store_memory": 80 << 20}
# Runs start the processes that they need; Ray would start one for every CPU besides.
ALONE = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs, one of them the head. The other is killed by a test, a third is added and killed."""
    from ray import cluster_utils

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    try:
        head = {"include_dashboard": False, "_system_config": ALONE, **SMALL}
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        made.add_node(**SMALL)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield made
    made.shutdown()


def words(cluster: Any, *more: str) -> tuple[str, ...]:
    return ("--launcher", "ray", "--address", cluster.address, *more)


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        line = process.stderr.readline()
        assert line, f"ended without {text!r}:\n{''.join(lines)}"
        lines.append(line)
    return lines


@pytest.mark.sweep  # fifteen seconds
def test_two_runs_share_a_cluster_and_the_one_that_is_killed_leaves_no_ranks(project: Command, cluster: Any) -> None:
    """Each takes one of the two CPUs of every node, so two ranks are on two nodes, which results name."""
    project.planted("hanging", 2)
    hanging = project.start("run", "hanging", *words(cluster, "--slots", "1"))
    assert "(1 slot)" in lines_until(hanging, "runs on")[-1]
    out = project.folder / "result.json"
    done = project.run("run", "smoke", *words(cluster, "--slots", "1", "--json", str(out)))
    assert done.returncode == 0 and "(1 slot)" in done.stderr, done.stdout + done.stderr
    document = read_run(out)
    assert document["provenance"]["launcher"] == "ray"
    assert [case["verdict"] for case in document["cases"]] == ["passed"] * 4
    nodes = [len(set(case["attempts"][0]["nodes"])) for case in document["cases"]]
    assert nodes == [case["world_size"] for case in document["cases"]] == [1, 2, 2, 1]
    assert document["cases"][0]["command"].endswith(f"--launcher ray --address {cluster.address}")
    started = wait_for_ranks(2)
    assert hanging.poll() is None
    hanging.kill()
    hanging.communicate()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def wait_for_ranks(nodes: int) -> list[psutil.Process]:
    """The fork server and the rank of each of these nodes, once they are there."""
    give_up_s = time.monotonic() + 60
    while len(started := _of_program()) < 2 * nodes:
        assert time.monotonic() < give_up_s, "the ranks did not start"
        time.sleep(0.1)
    return started


@pytest.mark.sweep
def test_sixteen_ranks_on_two_nodes_compute_what_one_rank_does(project: Command, cluster: Any) -> None:
    """With torch, over gloo."""
    project.environment["FP8_HARNESS_PROGRAM"] = "harness.worker.main"
    out = project.folder / "result.json"
    given = words(cluster, "--slots", "8", "--backend", "gloo", "--json", str(out))
    done = project.run("run", "fsdp8-tp2-rowwise-v2048-s2-f64", *given, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = read_run(out)["cases"]
    assert case["verdict"] == "passed" and len(case["attempts"][0]["nodes"]) == 2
    assert case["measured"]["parity"] < 1e-14


def _of_program() -> list[psutil.Process]:
    """The processes that actors of a cluster started: the others of this machine are children of a command."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if "tests.acceptance.fake_program" in (process.info["cmdline"] or ()):
            above = [" ".join(parent.cmdline()) for parent in process.parents()]
            if any("NodeActor" in line or "default_worker.py" in line for line in above):
                processes.append(process)
    return processes


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    """This process is connected to the cluster: a driver that starts no other."""
    ray = connect(cluster.address)
    yield ray
    ray.shutdown()


def test_what_cannot_run_is_refused_before_anything_is_reserved(project: Command, cluster: Any, connected: Any) -> None:
    project.cases("large", 'recipe = "rowwise", dp_shard = 4, steps = 3, loss_tolerance = 0.05')
    done = project.call("run", "large", *words(cluster, "--slots", "1"))
    assert done.returncode == 2 and "need more than the 2 slots there are" in done.stderr
    done = project.call("run", "smoke", *words(cluster, "--device", "cuda"))
    assert done.returncode == 2 and "no node of the cluster has a GPU" in done.stderr
    assert connected.available_resources()["CPU"] == 4


def test_a_run_that_must_wait_says_so_and_for_how_much(connected: Any) -> None:
    """And the group that it asked for is given back."""
    ray = connected
    machines = [machine for machine in alive_machines(ray) if machine.cpus]
    bundles = [{"CPU": 2.0}] * 2
    held = ray_connection.place_group(ray, machines, bundles, pytest.fail)
    notes: list[str] = []
    with pytest.raises(HarnessError, match=r"2 CPU on each of 2 nodes were not free within 1 s; of 4 CPU .* 0 are"):
        ray_connection.place_group(ray, machines, bundles, notes.append, wait_s=1)
    assert notes == ["waits for other runs: it needs 2 CPU on each of 2 nodes; of 4 CPU in the cluster 0 are free."]
    held.close()
    ray_connection.place_group(ray, machines, bundles, pytest.fail).close()


def test_a_node_that_dies_costs_its_cases_one_attempt(project: Command, cluster: Any) -> None:
    project.planted("slow", 6, 6)
    process = project.start("run", "slow", *words(cluster, "--slots", "2", "-j", "1", "--json", "-"))
    lines_until(process, "passed ")
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    output, err = process.communicate(timeout=120)
    assert process.returncode == 0, output + err
    document = tree(output)
    assert [case["verdict"] for case in document["cases"]] == ["passed"] * 2
    retried = [case["attempts"] for case in document["cases"] if len(case["attempts"]) > 1]
    # None, where the node died between two cases or in a witness, which is run once more as well.
    assert all("was lost" in first["message"] for first, _ in retried)
    assert all(first["nodes"] != second["nodes"] for first, second in retried)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head", "ray://127.0.0.1:10001"])
def test_an_address_without_a_cluster_is_told_at_once(project: Command, address: str) -> None:
    started_s = time.monotonic()
    done = project.call("run", "smoke", "--launcher", "ray", "--address", address)
    assert done.returncode == 2 and f"--address {address}: " in done.stderr and "Fix: " in done.stderr
    assert time.monotonic() - started_s < 30  # Ray tries for minutes


def test_something_else_that_listens_there_is_told_in_seconds(project: Command) -> None:
    project.environment |= {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "1"}
    with socket.create_server(("0.0.0.0", 0)) as server:
        done = project.run("run", "smoke", "--launcher", "ray", "--address", f"127.0.0.1:{server.getsockname()[1]}")
    assert done.returncode == 2 and "the Ray cluster refuses" in done.stderr and "RAY_AUTH_MODE=token" in done.stderr


def test_an_address_is_for_ray(project: Command) -> None:
    done = project.call("run", "smoke", "--address", "auto")
    assert done.returncode == 2 and "it is for --launcher ray" in done.stderr


def test_without_ray_the_extra_is_named(project: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = project.call("run", "smoke", "--launcher", "ray")
    assert done.returncode == 2 and "pip install 'fp8-harness[cluster]'" in done.stderr, done.stderr
