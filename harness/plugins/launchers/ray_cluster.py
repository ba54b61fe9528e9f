"""The Ray cluster of a run: what its nodes have, whether they are alike, and the nodes opened for the run.

A node is an actor in a bundle of the group of the run, which owns its fork servers and ranks and dies with the driver.
Whatever crosses the cluster is bytes of `messages.py`, or plain strings and numbers.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from harness.engine import hardware
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import Message, Share, ShareEvent, ShareOutcome
from harness.engine.node import LocalNode, NodeLost, Reservation, Scratch
from harness.errors import HarnessError
from harness.plugins.launchers.ray_connection import Group, RayMachine, alive_machines, bundle, connect, place_group
from harness.sources import software
from harness.text import changed_facts, counted


class NodeSpec(Message, frozen=True, kw_only=True):
    """What the driver of a run asks of a node. `environ`: variables of the driver that change what ranks compute."""

    program: str
    capacity: hardware.NodeCapacity
    logs: str = ""  # keep the folders of jobs here; empty: remove them
    environ: Mapping[str, str] = {}


class NodeFacts(Message, frozen=True, kw_only=True):
    """What a node is: slots and device, versions and sources of its packages."""

    capacity: hardware.NodeCapacity
    software: Mapping[str, str]


SPECS = msgspec.msgpack.Decoder(NodeSpec)  # decoders are made before any thread decodes: msgspec would crash
FACTS = msgspec.msgpack.Decoder(NodeFacts)
ANSWERS: msgspec.msgpack.Decoder[Reservation | str] = msgspec.msgpack.Decoder(Reservation | str)
SHARES = msgspec.msgpack.Decoder(Share)
TOLD: msgspec.msgpack.Decoder[ShareEvent | ShareOutcome] = msgspec.msgpack.Decoder(ShareEvent | ShareOutcome)


class NodeActor(LocalNode):
    """The `LocalNode` behind a `RayNode`. Methods are called from several threads."""

    def __init__(self, spec: bytes) -> None:
        asked = SPECS.decode(spec)
        os.environ.update(asked.environ)
        # Without the folders that Ray puts before those of the environment: copies of packages of its own.
        sys.path[:] = [
            path for path in sys.path if not path.endswith(("/ray/thirdparty_files", "/ray/_private/workers"))
        ]
        # Ray decides who has these CPUs or GPUs, so no other process shares their leases.
        self._private = Scratch()
        super().__init__(
            lambda preload: ForkServerEngine(asked.program, preload),
            hardware.open_leases(self._private.path, asked.capacity.device, asked.capacity.slots),
            asked.capacity,
            logs=Path(asked.logs) if asked.logs else None,
        )

    def slots(self) -> int:
        return self.capacity.slots

    def hold(self, job_id: str, count: int) -> bytes:
        """`reserve`; returns the `Reservation`, or why there is none."""
        answer: Reservation | str
        try:
            answer = self.reserve(job_id, count)
        except OSError as error:
            answer = str(error)
        except HarnessError as error:
            answer = error.text
        return msgspec.msgpack.encode(answer)

    def stream(self, share: bytes) -> Iterator[bytes]:
        """`run` a `Share`; yields every `ShareEvent` when it happens, and last the `ShareOutcome`."""
        messages: queue.SimpleQueue[ShareEvent | ShareOutcome] = queue.SimpleQueue()
        asked = SHARES.decode(share)

        def work() -> None:
            outcome = ShareOutcome(infra="the actor of the node failed")
            try:
                outcome = self.run(asked, messages.put)
            finally:
                messages.put(outcome)

        threading.Thread(target=work, daemon=True).start()
        while isinstance(message := messages.get(), str):
            yield msgspec.msgpack.encode(message)
        yield msgspec.msgpack.encode(message)

    def close(self) -> None:
        super().close()
        self._private.close()


def node_facts(device: hardware.Device) -> bytes:
    return msgspec.msgpack.encode(NodeFacts(capacity=hardware.capacity_here(device), software=software()))


_START_S = 120.0  # of an actor, on a busy machine
_CLOSE_S = 15.0  # longer than a fork server needs to end its ranks
_DIED = ("NodeDiedError", "ActorUnschedulableError", "TaskUnschedulableError", "LocalRayletDiedError")
_THREADS = 1000  # of an actor: for every job one that runs or waits for slots, and those that end it


class RayNode:
    """One node. Every method raises NodeLost when its actor, or its machine, has died.

    It starts the actor in bundle `index`; `check_started` says whether that worked.
    """

    def __init__(self, ray: Any, group: Group, index: int, spec: NodeSpec) -> None:
        self.name = spec.capacity.host
        self.capacity = spec.capacity
        self._ray = ray
        self._group = group
        self._actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=group.bundles[index].get("CPU", 0),
                num_gpus=group.bundles[index].get("GPU", 0),
                max_concurrency=_THREADS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group.handle, placement_group_bundle_index=index
                ),
            )
            .remote(msgspec.msgpack.encode(spec))
        )
        self._slots = self._actor.slots.remote()

    def check_started(self) -> None:
        """Wait for the actor. Raises HarnessError if it does not start, or has other devices than reported."""
        try:
            slots = self._ray.get(self._slots, timeout=_START_S)
        except self._ray.exceptions.RayError as error:
            raise not_started(self.name, error) from error
        if slots != self.capacity.slots:
            raise HarnessError(
                f"Ray reserved {self.capacity.slots} GPUs, but its actor sees {slots}.",
                where=f"node {self.name}",
                fix="see CUDA_VISIBLE_DEVICES and nvidia-smi on that node.",
            )

    def reserve(self, job_id: str, count: int) -> Reservation:
        answer = ANSWERS.decode(self._ask("hold", job_id, count))
        if isinstance(answer, str):
            raise OSError(f"node {self.name}: {answer}")
        return answer

    def warm(self, preload: Mapping[str, str]) -> None:
        self._ask("warm", dict(preload))

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        with self._answering():
            for reference in self._actor.stream.remote(msgspec.msgpack.encode(share)):
                message = TOLD.decode(self._ray.get(reference))
                if isinstance(message, ShareOutcome):
                    return message
                report(message)
        raise NodeLost(f"node {self.name} ended {share.job.job_id} without an outcome")

    def end(self, job_id: str) -> None:
        self._ask("end", job_id)

    def release(self, job_id: str) -> None:
        self._ask("release", job_id)

    def free(self, job_id: str) -> None:
        self._ask("free", job_id)

    def close(self) -> None:
        """Kill every rank and every fork server there, then the actor, and leave the group."""
        with suppress(NodeLost):
            self._ask("close", timeout_s=_CLOSE_S)
        self._ray.kill(self._actor)
        self._group.leave()

    def _ask(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        with self._answering():
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self._ray.exceptions.RayTaskError:
            raise  # a fault of the harness there, with its traceback
        except self._ray.exceptions.RayError as error:
            raise NodeLost(f"node {self.name} was lost: {ray_message(error)}") from error


def not_started(name: str, error: Exception) -> HarnessError:
    """Return the HarnessError for a node on which the harness does not start, or which died before Ray noticed."""
    if type(error).__name__ in _DIED:
        return HarnessError(
            f"it does not answer: {ray_message(error)}",
            where=f"node {name}",
            fix="see whether `ray status` still lists it, some seconds after a node has died, and run it again.",
        )
    return HarnessError(
        f"the harness does not start there: {ray_message(error)}",
        where=f"node {name}",
        fix="install the same packages on that node, or remove it from the cluster.",
    )


def ray_message(error: Exception) -> str:
    """Return the message of a Ray error on one line: the exception of the other process, or its first sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "Traceback" in str(error) or "ray::" in str(error) else lines[0]


_FACTS_S = 120.0  # of a process that must be started on a busy machine, and reads the sources of torch


def has_gpus(address: str) -> bool:
    """Return True if Ray knows of a GPU in the cluster."""
    return any(machine.gpus for machine in alive_machines(connect(address)))


def cluster_capacity(address: str, device: hardware.Device, slots: int | None) -> hardware.Capacity:
    """Return what every node with a CPU, or a GPU, has; `slots`: on each. Reserves nothing.

    Raises HarnessError if there is no such node, and where nodes differ in what numbers depend on.
    """
    ray = connect(address)
    machines = [machine for machine in alive_machines(ray) if slots_of(machine, device, slots)]
    if not machines:
        raise HarnessError(
            f"no node of the cluster has a {'GPU' if device == 'cuda' else 'CPU'} for ranks.",
            where="--launcher ray",
            fix="add nodes by `ray start --address HOST:PORT`.",
        )
    facts = _facts(ray, machines, device)
    check_alike(software(), facts)
    return hardware.Capacity(
        nodes=tuple(
            msgspec.structs.replace(
                facts[machine.name].capacity, host=machine.name, slots=slots_of(machine, device, slots)
            )
            for machine in machines
        )
    )


def open_nodes(
    address: str, capacity: hardware.Capacity, *, program: str, logs: Path | None, note: Callable[[str], None]
) -> list[RayNode]:
    """Reserve these nodes and start their actors; waits for what other runs hold. Every node must be closed.

    Raises HarnessError if they cannot be reserved, or an actor does not start.
    """
    ray = connect(address)
    machines = {machine.name: machine for machine in alive_machines(ray)}
    if left := [node.host for node in capacity.nodes if node.host not in machines]:
        raise HarnessError(f"{', '.join(left)} left the cluster.", where="--launcher ray", fix="run it again.")
    mine = [machines[node.host] for node in capacity.nodes]
    bundles = [bundle(machine, node.device, node.slots) for machine, node in zip(mine, capacity.nodes, strict=True)]
    group = place_group(ray, mine, bundles, note)
    environ = {name: os.environ[name] for name in hardware.ARITHMETIC if name in os.environ}
    nodes = []
    for index, node in enumerate(capacity.nodes):
        own_logs = str(logs / node.host) if logs else ""  # nodes may share a file system
        spec = NodeSpec(program=program, capacity=node, logs=own_logs, environ=environ)
        nodes.append(RayNode(ray, group, index, spec))
    try:
        for ray_node in nodes:
            ray_node.check_started()
    except BaseException:
        group.close()
        raise
    have = (f"{node.host} ({counted(node.slots, 'slot')})" for node in capacity.nodes)
    note(f"runs on {', '.join(have)}.")
    return nodes


def own_address(address: str) -> str:
    """Return the IP address at which the nodes of the cluster reach this machine."""
    return str(connect(address).util.get_node_ip_address())


def check_alike(here: Mapping[str, str], nodes: Mapping[str, NodeFacts]) -> None:
    """Raise HarnessError if a node has other packages than this machine, or another device than the first node."""
    first = next(iter(nodes.values())).capacity
    differing = []
    for name, facts in nodes.items():
        differs = changed_facts(here, facts.software, sorted({*here, *facts.software}))
        differs += changed_facts(_device(first), _device(facts.capacity), _device(first))
        if differs:
            differing.append(f"{name}: {', '.join(differs)}")
    if differing:
        raise HarnessError(
            f"{len(differing)} of {len(nodes)} nodes differ from this machine, or from the first node: "
            f"{'; '.join(differing)}.",
            where="--launcher ray",
            fix="install the same on all, such as one image, or take these nodes out of the cluster.",
        )


def _facts(ray: Any, machines: list[RayMachine], device: hardware.Device) -> dict[str, NodeFacts]:
    """Return the facts of all nodes, queried in parallel. Needs no free CPU on them."""
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


def slots_of(machine: RayMachine, device: hardware.Device, slots: int | None) -> int:
    """As many as asked for; all GPUs, of which there cannot be more; a CPU each, and what a small machine bears."""
    if device == "cuda":
        return min(machine.gpus, slots or machine.gpus)
    return (slots or max(hardware.MIN_CPU_SLOTS, machine.cpus)) if machine.cpus else 0


def _device(capacity: hardware.NodeCapacity) -> dict[str, str]:
    """Return what ranks compute on: a case and its counterpart may run on different nodes, and must not differ in a
    bit.
    """
    if capacity.device == "cpu":
        return {"CPU": capacity.cpu}
    return {"device": capacity.device_name, "architecture": capacity.architecture, "driver": capacity.driver}
