"""The same command on two nodes, which are two launchers on one machine: one report, one exit code."""

from __future__ import annotations

import json
import socket
import subprocess

from tests.acceptance.conftest import Command


def rendezvous() -> tuple[str, ...]:
    """The options of a command on two nodes with one slot each, but for --node-rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--slots", "1", "--device", "cpu")


def start_other(project: Command, *words: str) -> subprocess.Popen[str]:
    """The launcher of node 1. Its slots are its own, as those of another machine are."""
    environment = {"FP8_HARNESS_STATE": str(project.folder / "state-1")}
    return Command(project.folder, environment).start(*words, "--node-rank", "1")


def test_cases_that_fit_on_no_node_run_on_both_and_both_exit_alike(project: Command) -> None:
    project.planted("bad", 1)
    where = rendezvous()
    command = ("run", "smoke", "bad", "--select", "dp_shard=2", *where)
    other = start_other(project, *command)
    done = project.call(*command, "--json", "out.json")
    out, err = other.communicate(timeout=30)
    assert (done.returncode, other.returncode) == (1, 1), done.stdout + done.stderr + out + err
    assert "2 nodes: " in done.stderr and " with 1 slot." in done.stderr
    assert "planted failure" in done.stdout
    good, bad = json.loads((project.folder / "out.json").read_text())["cases"]
    assert (good["verdict"], bad["verdict"]) == ("passed", "crash")
    assert " ".join(where[:4]) in good["command"]


def test_without_the_other_node_nothing_runs(project: Command) -> None:
    done = project.call("run", "smoke", *rendezvous(), "--rdzv-timeout-s", "0.5")
    assert done.returncode == 2
    assert "1 of 2 nodes did not come within 0.5 s: node rank 1." in done.stderr
