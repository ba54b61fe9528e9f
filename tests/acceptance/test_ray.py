"""`--engine ray` on a cluster whose nodes are processes of this machine: losses, other runs, refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from harness.engine import ray_group
from harness.engine.ray_connection import alive_machines, connect
from harness.errors import HarnessError
from tests.acceptance.conftest import REPOSITORY, Command

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fp8-harness[cluster]'")

SMALL = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with two each. One of them is killed by a test."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    try:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL})
        for _ in range(2):
            made.add_node(num_cpus=2, **SMALL)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield made
    made.shutdown()


def words(cluster: Any, *more: str) -> tuple[str, ...]:
    return ("--engine", "ray", "--address", cluster.address, *more)


def slow_tier(project: Command, count: int) -> None:
    """Cases of two ranks of a second each."""
    axes = 'recipe = "tensorwise", dp_shard = 2, steps = 3, loss_tolerance = 0.05, seed = 6'
    cases = "".join(f"[[case]]\naxes = {{{axes}, lr = 0.00{number}}}\n" for number in range(1, count + 1))
    project.tier("slow", cases)


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        line = process.stderr.readline()
        assert line, f"ended without {text!r}:\n{''.join(lines)}"
        lines.append(line)
    return lines


def test_two_runs_share_a_cluster(project: Command, cluster: Any) -> None:
    """Each takes one of the two CPUs of every node, so two ranks are on two nodes, which results name."""
    out = project.folder / "result.json"
    first = project.start("run", "smoke", *words(cluster, "--slots", "1", "--json", str(out)))
    second = project.start("run", "smoke", *words(cluster, "--slots", "1"))
    for process in (first, second):
        output, err = process.communicate(timeout=120)
        assert process.returncode == 0, output + err
        assert "(1 slot)" in err
    document = json.loads(out.read_text())
    assert document["provenance"]["engine"] == "ray"
    assert [case["verdict"] for case in document["cases"]] == ["passed"] * 4
    nodes = [len(set(case["attempts"][0]["nodes"])) for case in document["cases"]]
    assert nodes == [case["world_size"] for case in document["cases"]] == [1, 2, 2, 1]
    assert document["cases"][0]["command"].endswith(f"--engine ray --address {cluster.address}")


@pytest.mark.sweep
def test_sixteen_ranks_on_two_nodes_compute_what_one_rank_does(project: Command, cluster: Any) -> None:
    """With torch, over gloo."""
    project.environment["FP8_HARNESS_PROGRAM"] = "harness.worker.main"
    out = project.folder / "result.json"
    given = words(cluster, "--slots", "8", "--fabric", "gloo", "--json", str(out))
    done = project.run("run", "--case", "fsdp8-tp2-rowwise-v2048-s2-f64", *given, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    assert case["verdict"] == "passed" and len(case["attempts"][0]["nodes"]) == 2
    assert case["measured"]["parity"] < 1e-14


def test_what_cannot_run_is_refused_before_anything_is_reserved(project: Command, cluster: Any) -> None:
    project.tier("large", '[[case]]\naxes = {recipe = "rowwise", dp_shard = 4, steps = 3, loss_tolerance = 0.05}\n')
    done = project.run("run", "large", *words(cluster, "--slots", "1"))
    assert done.returncode == 2 and "need more than the 2 slots there are" in done.stderr
    done = project.run("run", "smoke", *words(cluster, "--device", "cuda"))
    assert done.returncode == 2 and "no node of the cluster has a GPU" in done.stderr


def test_a_killed_driver_leaves_no_ranks(project: Command, cluster: Any) -> None:
    project.planted("hanging", 2)
    process = project.start("run", "hanging", *words(cluster))
    lines_until(process, "runs on")
    give_up_s = time.monotonic() + 60
    while len(started := _of_program()) < 3:  # a warm process and two ranks
        assert time.monotonic() < give_up_s, "the ranks did not start"
        time.sleep(0.1)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def _of_program() -> list[psutil.Process]:
    """The processes that actors of a cluster started: the others of this machine are children of a command."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "tests.acceptance.fake_program" in (process.info["cmdline"] or ()):
            above = [" ".join(each.cmdline()) for each in process.parents()]
            if any("NodeActor" in line or "default_worker.py" in line for line in above):
                found.append(process)
    return found


def test_a_run_that_must_wait_says_so_and_for_how_much(cluster: Any) -> None:
    """And the group that it asked for is given back."""
    ray = connect(cluster.address)
    try:
        machines = [machine for machine in alive_machines(ray) if machine.cpus]
        bundles = [{"CPU": 2.0}] * 2
        held = ray_group.place_group(ray, machines, bundles, pytest.fail)
        notes: list[str] = []
        with pytest.raises(HarnessError, match=r"2 CPU on each of 2 nodes were not free within 1 s; of 4 CPU .* 0 are"):
            ray_group.place_group(ray, machines, bundles, notes.append, wait_s=1)
        assert notes == ["waits for other runs: it needs 2 CPU on each of 2 nodes; of 4 CPU in the cluster 0 are free."]
        held.close()
        ray_group.place_group(ray, machines, bundles, pytest.fail).close()
    finally:
        ray.shutdown()


def test_a_node_that_dies_costs_its_cases_one_attempt(project: Command, cluster: Any) -> None:
    slow_tier(project, 6)
    process = project.start("run", "slow", *words(cluster, "--slots", "2", "-j", "1", "--json", "-"))
    lines_until(process, "[1/6]")
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    output, err = process.communicate(timeout=120)
    assert process.returncode == 0, output + err
    document = json.loads(output)
    assert [case["verdict"] for case in document["cases"]] == ["passed"] * 6
    retried = [case["attempts"] for case in document["cases"] if len(case["attempts"]) > 1]
    # None, where the node died between two cases or in a witness, which is run once more as well.
    assert all("was lost" in first["message"] for first, _ in retried)
    assert all(first["nodes"] != second["nodes"] for first, second in retried)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head", "ray://127.0.0.1:10001"])
def test_an_address_without_a_cluster_is_told_at_once(project: Command, address: str) -> None:
    started_s = time.monotonic()
    done = project.run("run", "smoke", "--engine", "ray", "--address", address)
    assert done.returncode == 2 and f"--address {address}: " in done.stderr and "Fix: " in done.stderr
    assert time.monotonic() - started_s < 30  # Ray tries for minutes


def test_something_else_that_listens_there_is_told_in_seconds(project: Command) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        done = project.run("run", "smoke", "--engine", "ray", "--address", f"127.0.0.1:{server.getsockname()[1]}")
    assert done.returncode == 2 and "the Ray cluster refuses" in done.stderr and "RAY_AUTH_MODE=token" in done.stderr


def test_an_address_is_for_ray(project: Command) -> None:
    done = project.run("run", "smoke", "--address", "auto")
    assert done.returncode == 2 and "it is for --engine ray" in done.stderr


def test_without_ray_the_extra_is_named(project: Command) -> None:
    code = "import sys; sys.modules['ray'] = None; sys.argv[1:] = ['run', 'smoke', '--engine', 'ray']; "
    done = subprocess.run(
        [sys.executable, "-c", code + "from harness.__main__ import main; sys.exit(main())"],
        cwd=project.folder,
        env=project.environment_of_runs(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "pip install 'fp8-harness[cluster]'" in done.stderr, done.stderr
