"""The capacity of nodes: how many ranks they run at the same time, and on what. Known before any rank starts."""

from __future__ import annotations

import os

from harness.engine.devices import count_slots, cuda_devices
from harness.engine.gpus import architecture_of, in_use, kind_of
from harness.engine.hardware import Device, cpu_extensions, driver_version, host_name
from harness.engine.messages import Message


class NodeCapacity(Message, frozen=True, kw_only=True):
    """What one machine has. `slots` is how many ranks (CPU) or devices (CUDA) it runs at the same time."""

    host: str
    slots: int
    device: Device
    device_name: str  # as ranks report it: "cpu", or such as "NVIDIA H200"
    architecture: str = ""  # such as "sm90"; empty on a CPU
    driver: str = ""  # version of the NVIDIA driver; empty on a CPU
    cpu: str = ""  # model and extensions
    threads: int = 0  # of the CPU, that its processes may use
    in_use: tuple[str, ...] = ()  # a sentence for each GPU that other processes computed on before the first case


class Capacity(Message, frozen=True, kw_only=True):
    """What the nodes of a run have, together."""

    nodes: tuple[NodeCapacity, ...] = ()

    @property
    def total(self) -> int:
        """Slots of all nodes."""
        return sum(node.slots for node in self.nodes)

    @property
    def largest(self) -> int:
        """Slots of the largest node."""
        return max((node.slots for node in self.nodes), default=0)


def capacity_here(device: Device, slots: int | None = None) -> NodeCapacity:
    """The capacity of this machine with `slots`, or as many as fit. Raises HarnessError for unnamed or mixed GPUs."""
    gpus = cuda_devices(slots) if device == "cuda" else ()
    return NodeCapacity(
        host=host_name(),
        slots=count_slots(device, slots),
        device=device,
        device_name=kind_of(gpus) if device == "cuda" else "cpu",
        architecture=architecture_of(gpus, os.environ),
        driver=driver_version() if device == "cuda" else "",
        cpu=cpu_extensions(),
        threads=len(os.sched_getaffinity(0)),
        in_use=in_use(gpus, os.environ),
    )
