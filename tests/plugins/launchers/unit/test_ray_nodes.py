"""The nodes of a Ray cluster: what is reserved of them, and whether they are alike."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.engine.hardware import NodeCapacity
from harness.errors import HarnessError
from harness.plugins.launchers.ray_cluster import NodeFacts, check_alike, ray_message, slots_of
from harness.plugins.launchers.ray_connection import RayMachine, bundle

GPUS = RayMachine(name="b", node_id="2", cpus=32, gpus=8)
CPUS = RayMachine(name="a", node_id="1", cpus=4, gpus=0)
HEAD = RayMachine(name="head", node_id="0", cpus=0, gpus=0)
HERE = {"torch": "2.13.0", "torch sources": "ab12", "python": "3.12.1"}
GPU = NodeCapacity(host="b", slots=8, device="cuda", device_name="NVIDIA H200", architecture="sm90", driver="580")


@pytest.mark.parametrize(
    ("machine", "device", "asked", "slots", "reserved"),
    [
        (GPUS, "cuda", None, 8, {"GPU": 8.0, "CPU": 8.0}),
        (GPUS, "cuda", 2, 2, {"GPU": 2.0, "CPU": 2.0}),
        (GPUS, "cuda", 16, 8, {"GPU": 8.0, "CPU": 8.0}),
        (GPUS, "cpu", None, 32, {"CPU": 32.0}),
        (CPUS, "cpu", None, 10, {"CPU": 4.0}),  # tiny ranks share a core
        (CPUS, "cpu", 2, 2, {"CPU": 2.0}),
    ],
)
def test_what_is_reserved_of_a_node(machine, device, asked, slots, reserved) -> None:
    assert slots_of(machine, device, asked) == slots
    assert bundle(machine, device, slots) == reserved


def test_a_node_without_cpus_or_gpus_has_no_ranks() -> None:
    assert slots_of(HEAD, "cpu", 4) == slots_of(CPUS, "cuda", None) == 0


def test_nodes_that_differ_are_named_with_what_differs_and_cpus_may_under_gpus() -> None:
    check_alike(HERE, {name: NodeFacts(capacity=replace(GPU, host=name), software=HERE) for name in "ab"})
    nodes = {
        "a": NodeFacts(capacity=GPU, software=HERE),
        "b": NodeFacts(capacity=GPU, software=HERE | {"torch": "2.12.0", "torch sources": "cd34"}),
        "c": NodeFacts(capacity=GPU, software={"python": "3.12.1", "torch": "2.13.0"}),
        "d": NodeFacts(capacity=replace(GPU, device_name="NVIDIA H100"), software=HERE),
    }
    with pytest.raises(HarnessError) as raised:
        check_alike(HERE, nodes)
    assert raised.value.what == (
        "3 of 4 nodes differ from this machine, or from the first node: "
        "b: torch 2.13.0 -> 2.12.0, torch sources ab12 -> cd34; c: torch sources ab12 -> none; "
        "d: device NVIDIA H200 -> NVIDIA H100."
    )
    nodes = {name: NodeFacts(capacity=replace(GPU, cpu=name), software=HERE) for name in "ab"}
    check_alike(HERE, nodes)
    on_cpus = {name: replace(node, capacity=replace(node.capacity, device="cpu")) for name, node in nodes.items()}
    with pytest.raises(HarnessError, match="b: CPU a -> b"):
        check_alike(HERE, on_cpus)


def test_of_an_exception_on_a_node_the_last_line_is_told() -> None:
    remote = "ray::NodeActor.slots()\n  File \"x.py\", line 1\nModuleNotFoundError: No module named 'harness'\n"
    assert ray_message(RuntimeError(remote)) == "ModuleNotFoundError: No module named 'harness'"
    assert ray_message(RuntimeError("The actor died.\n\tadvice")) == "The actor died."
