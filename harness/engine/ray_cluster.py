"""The Ray cluster of a run: what its nodes have, whether they are alike, and the nodes opened for the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.engine.capacity import Capacity, NodeCapacity
from harness.engine.devices import MIN_CPU_SLOTS
from harness.engine.hardware import ARITHMETIC, Device
from harness.engine.ray_actor import FACTS, NodeFacts, NodeSpec, node_facts
from harness.engine.ray_connection import RayMachine, alive_machines, connect
from harness.engine.ray_group import bundle, place_group
from harness.engine.ray_node import RayNode, not_started
from harness.environment import changed_facts
from harness.errors import HarnessError
from harness.plural import counted
from harness.sources import software

_FACTS_S = 120.0  # of a process that must be started on a busy machine, and reads the sources of torch


def cluster_device(address: str, asked: str) -> Device:
    """The device that `auto`, `cpu` or `cuda` means in a cluster; `auto` is `cuda` where Ray knows of a GPU."""
    if asked == "auto":
        return "cuda" if any(machine.gpus for machine in alive_machines(connect(address))) else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def cluster_capacity(address: str, device: Device, slots: int | None) -> Capacity:
    """What every node with a CPU, or a GPU, has; `slots`: on each. Reserves nothing.

    Raises HarnessError where there is no such node, and where nodes differ in what numbers depend on.
    """
    ray = connect(address)
    machines = [machine for machine in alive_machines(ray) if slots_of(machine, device, slots)]
    if not machines:
        raise HarnessError(
            f"no node of the cluster has a {'GPU' if device == 'cuda' else 'CPU'} for ranks.",
            where="--engine ray",
            fix="add nodes by `ray start --address HOST:PORT`.",
        )
    facts = _facts(ray, machines, device)
    check_alike(software(), facts)
    return Capacity(
        nodes=tuple(
            msgspec.structs.replace(facts[each.name].capacity, host=each.name, slots=slots_of(each, device, slots))
            for each in machines
        )
    )


def open_nodes(
    address: str, capacity: Capacity, *, program: str, logs: Path | None, note: Callable[[str], None]
) -> list[RayNode]:
    """Reserve these nodes and start their actors; waits for what other runs hold. Every node must be closed.

    Raises HarnessError where they cannot be reserved, or an actor does not start.
    """
    ray = connect(address)
    machines = {machine.name: machine for machine in alive_machines(ray)}
    if left := [node.host for node in capacity.nodes if node.host not in machines]:
        raise HarnessError(f"{', '.join(left)} left the cluster.", where="--engine ray", fix="run it again.")
    mine = [machines[node.host] for node in capacity.nodes]
    bundles = [bundle(machine, node.device, node.slots) for machine, node in zip(mine, capacity.nodes, strict=True)]
    group = place_group(ray, mine, bundles, note)
    environ = {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
    nodes = [
        RayNode(ray, group, index, NodeSpec(program=program, capacity=node, logs=_logs(logs, node), environ=environ))
        for index, node in enumerate(capacity.nodes)
    ]
    try:
        for each in nodes:
            each.check_started()
    except BaseException:
        group.close()
        raise
    have = (f"{node.host} ({counted(node.slots, 'slot')})" for node in capacity.nodes)
    note(f"runs on {', '.join(have)}.")
    return nodes


def own_address(address: str) -> str:
    """The IP address at which the nodes of the cluster reach this machine."""
    return str(connect(address).util.get_node_ip_address())


def check_alike(here: Mapping[str, str], nodes: Mapping[str, NodeFacts]) -> None:
    """Raises HarnessError where a node has other packages than this machine, or another device than the first node."""
    first = next(iter(nodes.values())).capacity
    told = []
    for name, facts in nodes.items():
        differs = changed_facts(here, facts.software, sorted({*here, *facts.software}))
        differs += changed_facts(_device(first), _device(facts.capacity), _device(first))
        if differs:
            told.append(f"{name}: {', '.join(differs)}")
    if told:
        raise HarnessError(
            f"{len(told)} of {len(nodes)} nodes differ from this machine, or from the first node: {'; '.join(told)}.",
            where="--engine ray",
            fix="install the same on all, such as one image, or take these nodes out of the cluster.",
        )


def _facts(ray: Any, machines: list[RayMachine], device: Device) -> dict[str, NodeFacts]:
    """The facts of all nodes, queried in parallel. Needs no free CPU on them."""
    on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = ray.remote(node_facts)
    answers = {
        machine.name: asked.options(
            num_cpus=0, max_retries=0, scheduling_strategy=on_node(machine.node_id, soft=False)
        ).remote(device)
        for machine in machines
    }
    facts = {}
    for name, answer in answers.items():
        try:
            facts[name] = FACTS.decode(ray.get(answer, timeout=_FACTS_S))
        except ray.exceptions.RayError as error:
            raise not_started(name, error) from error
    return facts


def slots_of(machine: RayMachine, device: Device, slots: int | None) -> int:
    """As many as asked for; all GPUs, of which there cannot be more; a CPU each, and what a small machine bears."""
    if device == "cuda":
        return min(machine.gpus, slots or machine.gpus)
    return (slots or max(MIN_CPU_SLOTS, machine.cpus)) if machine.cpus else 0


def _device(capacity: NodeCapacity) -> dict[str, str]:
    """What ranks compute on: a case and its partner may run on different nodes, and must not differ in a bit."""
    if capacity.device == "cpu":
        return {"CPU": capacity.cpu}
    return {"device": capacity.device_name, "architecture": capacity.architecture, "driver": capacity.driver}


def _logs(folder: Path | None, node: NodeCapacity) -> str:
    """A folder of the node's own, because nodes may share a file system."""
    return str(folder / node.host) if folder else ""
