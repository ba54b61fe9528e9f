"""What a run holds of a Ray cluster: one placement group with a bundle for every node, from its begin to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.engine.hardware import Device
from harness.engine.ray_connection import RayMachine, alive_machines
from harness.errors import HarnessError
from harness.plural import counted

PLACE_S = 600.0  # for other runs to end
_POLL_S = 2.0  # how often a run that waits looks whether its nodes are still there
_NODE_LABEL = "ray.io/node-id"


class Group:
    """A placement group: a bundle on each of these machines, in their order."""

    def __init__(self, ray: Any, handle: Any, bundles: Sequence[Mapping[str, float]]) -> None:
        self._ray = ray
        self.handle = handle
        self.bundles = bundles
        self._lock = threading.Lock()
        self._used = len(bundles)

    def leave(self) -> None:
        """Say that one bundle is not needed any more. The last one gives the group back, as the end of the process."""
        with self._lock:
            self._used -= 1
            if self._used == 0:
                self.close()

    def close(self) -> None:
        """Give the group back; what runs in it is killed."""
        self._ray.util.remove_placement_group(self.handle)


def bundle(machine: RayMachine, device: Device, slots: int) -> dict[str, float]:
    """What is reserved for so many slots: GPUs, or the CPUs that there are, which tiny ranks share."""
    cpus = {"CPU": float(min(slots, machine.cpus))} if machine.cpus else {}
    return cpus if device == "cpu" else {"GPU": float(slots), **cpus}


def place_group(
    ray: Any,
    machines: Sequence[RayMachine],
    bundles: Sequence[Mapping[str, float]],
    note: Callable[[str], None],
    wait_s: float = PLACE_S,
) -> Group:
    """Reserve a bundle on each of these machines, all or nothing. Waits for what other runs hold.

    Raises HarnessError where they are not free in time, or where a machine leaves the cluster.
    """
    handle = ray.util.placement_group(
        bundles=[dict(each) for each in bundles],
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{_NODE_LABEL: machine.node_id} for machine in machines],
    )
    group = Group(ray, handle, bundles)
    until_s = time.monotonic() + wait_s
    told = False
    while not handle.wait(min(_POLL_S, wait_s)):
        if not told:
            told = True
            note(f"waits for other runs: it needs {_amount(bundles)}; {_free(ray, bundles)}.")
        left = {machine.name for machine in machines} - {machine.name for machine in alive_machines(ray)}
        if left or time.monotonic() > until_s:
            group.close()
            raise _left(left) if left else _taken(ray, bundles, wait_s)
    return group


def _left(names: set[str]) -> HarnessError:
    return HarnessError(
        f"{', '.join(sorted(names))} left the cluster before the run began.",
        where="--engine ray",
        fix="run it again: it takes the nodes that are there.",
    )


def _taken(ray: Any, bundles: Sequence[Mapping[str, float]], wait_s: float) -> HarnessError:
    return HarnessError(
        f"{_amount(bundles)} were not free within {wait_s:g} s; {_free(ray, bundles)}.",
        where="--engine ray",
        fix="wait for what holds them, which `ray status` lists, or give a smaller --slots.",
    )


def _amount(bundles: Sequence[Mapping[str, float]]) -> str:
    name = _scarce(bundles)
    counts = sorted({int(each[name]) for each in bundles})
    each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{each} {name} on each of {counted(len(bundles), 'node')}"


def _free(ray: Any, bundles: Sequence[Mapping[str, float]]) -> str:
    name = _scarce(bundles)
    has, free = (int(found.get(name, 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    return f"of {has} {name} in the cluster {free} are free"


def _scarce(bundles: Sequence[Mapping[str, float]]) -> str:
    return "GPU" if "GPU" in bundles[0] else "CPU"
