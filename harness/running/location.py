"""Where the ranks of a run may train: the meaning of --device, --fabric and --slots here, or on a Ray cluster."""

from collections.abc import Mapping

import msgspec

from harness.engine.hardware import Capacity, Device, capacity_here, cuda_devices
from harness.engine.ray_cluster import cluster_capacity, cluster_device
from harness.errors import HarnessError
from harness.evidence.verified import provable_levels
from harness.request import Fabric, default_arithmetic
from harness.run_options import PlanOptions
from harness.running.device_choice import Choice, Side, Sides
from harness.running.machine import not_nvidia, torch_build, unusable

# What collectives of a device can run on, the default first.
FABRICS: Mapping[Device, tuple[Fabric, ...]] = {"cpu": ("shared", "gloo"), "cuda": ("nccl",)}
_WHY_NOT = {
    "shared": "it passes tensors of a CPU through shared memory",
    "gloo": "it has no float8 collectives on a GPU",
    "nccl": "it needs a GPU for every rank",
}


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks train; the fields of a plan that follow from it. `side`: the GPUs, where there are two `sides`."""

    side: Side
    sides: Sides | None = None  # of --device auto where ranks can train on GPUs: what it chooses between
    usual: Choice | None = None  # what a case gets here without options; None: as without GPUs
    unused: str = ""  # why no GPU of this machine is used; empty without one
    idle: str = ""  # the GPUs that a run on the CPU leaves idle and that `dev evidence` could verify


def locate(asked: PlanOptions, cluster: str) -> Location:
    """Where these options have ranks train, on this machine or the Ray `cluster` of this address.

    Raises HarnessError for a device that is not there, and for a fabric of another device.
    """
    device, why = _device_asked(asked, cluster)
    if device == "cuda":
        return Location(side=_side("cuda", asked, cluster))
    gpus, unused = _usable_gpus(asked, cluster)
    idle = gpus.capacity.words if gpus is not None and _provable(gpus.capacity) else ""
    cpu = _side("cpu", asked, cluster)
    if gpus is None:
        return Location(side=cpu, unused=unused)
    if device == "cpu":
        return Location(side=cpu, usual=Choice("cuda", default_arithmetic("cpu")), unused=why, idle=idle)
    return Location(side=gpus, sides=Sides(gpus=gpus, cpu=cpu, may_be_exact=asked.arithmetic is None), idle=idle)


def _device_asked(asked: PlanOptions, cluster: str) -> tuple[Device | None, str]:
    """The device that options force, and by which; None where --device auto may choose."""
    has_gpus = cluster_device(cluster, "auto") == "cuda" if cluster else bool(cuda_devices())
    if asked.device == "cpu":
        return "cpu", "--device cpu"
    if asked.device == "cuda":
        if not has_gpus and not cluster:
            raise HarnessError("there is no CUDA device here.", where="--device cuda", fix="use --device cpu.")
        return "cuda", ""
    if asked.fabric in (None, "auto"):
        return None, ""
    on_cpu = asked.fabric in FABRICS["cpu"] or not has_gpus
    return ("cpu", f"--fabric {asked.fabric}") if on_cpu else ("cuda", "")


def _usable_gpus(asked: PlanOptions, cluster: str) -> tuple[Side | None, str]:
    """The GPUs that ranks can train on; or why these are not used, which is empty without a GPU."""
    build = torch_build()
    if cluster_device(cluster, "auto") == "cpu" if cluster else not cuda_devices():
        return None, not_nvidia(build) if build is not None and build.hip else ""
    try:
        gpus = _side("cuda", msgspec.structs.replace(asked, fabric=None), cluster)
    except HarnessError as error:  # of several kinds, or without a name
        return None, f"{error.what.partition('. ')[0]}; {(error.fix or '').rstrip('.')}"
    first = gpus.capacity.nodes[0]
    why = unusable(first, build)
    return (None, f"{why}, so {gpus.capacity.words} cannot be used") if why else (gpus, "")


def _provable(capacity: Capacity) -> bool:
    capability = capacity.nodes[0].capability
    return capability is not None and bool(provable_levels(capability, capacity.largest))


def _side(device: Device, asked: PlanOptions, cluster: str) -> Side:
    fabric = _resolve_fabric(asked.fabric or "auto", device)
    if cluster:
        capacity = cluster_capacity(cluster, device, asked.slots)
    else:
        capacity = Capacity(nodes=(capacity_here(device, asked.slots),))
    return Side(
        device=device,
        fabric=fabric,
        arithmetic=asked.arithmetic or default_arithmetic(device),
        capacity=capacity,
        jobs=asked.jobs * len(capacity.nodes),
    )


def _resolve_fabric(asked: str, device: Device) -> Fabric:
    """The fabric that `auto`, `shared`, `gloo` or `nccl` means here; HarnessError for one of another device."""
    offered = FABRICS[device]
    for fabric in offered:
        if asked in ("auto", fabric):
            return fabric
    raise HarnessError(
        f"ranks on {device} cannot use it: {_WHY_NOT[asked]}.",
        where=f"--fabric {asked}",
        fix=f"use --fabric {' or '.join(offered)}{'' if device == 'cuda' else ', or --device cuda'}.",
    )
