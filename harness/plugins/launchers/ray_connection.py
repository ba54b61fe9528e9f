"""The connection to a Ray cluster, and what a run holds of it. Imports Ray on demand.

The connection is made once per process and fails fast with a readable error. A run holds one placement group with a
bundle for every node, from its begin to its end.
"""

import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from harness.engine.hardware import Device
from harness.errors import HarnessError
from harness.run_options import AUTO
from harness.text import counted

_REACH_S = 5.0

# Ray tries for minutes where nothing answers, 20 times where a token is wrong. It reads these when it is imported.
_SECONDS = {
    "RAY_gcs_server_port_wait_time_s": "1",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "3",
}
_TOKEN = (
    "does it ask for a token? Then set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, here and on its nodes; "
    "`ray status --address {address}` shows the same"
)


class RayMachine(NamedTuple):
    """A node of the cluster. `name`: its host, with the start of its id where several have the same."""

    name: str
    node_id: str
    cpus: int
    gpus: int


def connect(address: str) -> Any:
    """Connect this process to the cluster, unless it is; returns the module `ray`.

    `address` is HOST:PORT or "auto". Raises HarnessError if Ray is not installed, nothing answers at the address, or
    the cluster refuses.
    """
    if importlib.util.find_spec("ray") is None:
        raise HarnessError("Ray is not installed.", where="--launcher ray", fix="pip install 'fp8-harness[cluster]'")
    named = os.environ.get("RAY_ADDRESS") or AUTO if address == AUTO else address
    if named != AUTO:
        _check_reachable(named)
    for name, value in _SECONDS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return ray
    try:
        with _keep_sigterm_handler():
            ray.init(address=named, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
        raise _refused(named, error) from error
    # Ray prints what it thinks of a lost node to stdout, where results may go, with 30 lines of its log.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return ray


def alive_machines(ray: Any) -> list[RayMachine]:
    """Return the machines that the cluster believes to be alive, in the order of their names."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    machines = [
        RayMachine(
            name=host if hosts.count(host) == 1 else f"{host}.{node['NodeID'][:6]}",
            node_id=node["NodeID"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node, host in zip(nodes, hosts, strict=True)
    ]
    return sorted(machines, key=lambda machine: machine.name)


def _check_reachable(address: str) -> None:
    """Raise HarnessError if no TCP connection can be made."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise HarnessError(
            "this is not the address of a Ray cluster.",
            where=f"--address {address}",
            fix="give HOST:PORT of its head, as `ray start --head` prints it, on a machine that is one of its nodes.",
        )
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise HarnessError(
            f"no Ray cluster answers: {error}.",
            where=f"--address {address}",
            fix="start its head there by `ray start --head --port PORT`, or name another address.",
        ) from error


def _refused(address: str, error: Exception) -> HarnessError:
    text = " ".join(str(error).split())
    if address == AUTO and isinstance(error, ConnectionError):
        return HarnessError(
            "this machine is in no Ray cluster.",
            where="--address auto",
            fix="start one by `ray start --head`, join one by `ray start --address HOST:PORT`, or set RAY_ADDRESS.",
        )
    fix = _TOKEN.format(address=address) if isinstance(error, ConnectionError) else "see what Ray says."
    return HarnessError(f"the Ray cluster refuses: {text.rstrip('.')}.", where=f"--address {address}", fix=fix)


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        with suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGTERM, before)


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
    """Return what is reserved for so many slots: GPUs, or the CPUs that there are, which tiny ranks share."""
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

    Raises HarnessError if they are not free in time, or where a machine leaves the cluster.
    """
    handle = ray.util.placement_group(
        bundles=[dict(resources) for resources in bundles],
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{_NODE_LABEL: machine.node_id} for machine in machines],
    )
    group = Group(ray, handle, bundles)
    until_s = time.monotonic() + wait_s
    noted = False
    while not handle.wait(min(_POLL_S, wait_s)):
        if not noted:
            noted = True
            note(f"waits for other runs: it needs {_amount(bundles)}; {_free(ray, bundles)}.")
        left = {machine.name for machine in machines} - {machine.name for machine in alive_machines(ray)}
        if not left and time.monotonic() <= until_s:
            continue
        group.close()
        what = f"{', '.join(sorted(left))} left the cluster before the run began."
        fix = "run it again: it takes the nodes that are there."
        if not left:
            what = f"{_amount(bundles)} were not free within {wait_s:g} s; {_free(ray, bundles)}."
            fix = "wait until they are free (`ray status`), or give a smaller --slots."
        raise HarnessError(what, where="--launcher ray", fix=fix)
    return group


def _amount(bundles: Sequence[Mapping[str, float]]) -> str:
    name = _scarce(bundles)
    counts = sorted({int(resources[name]) for resources in bundles})
    amount = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{amount} {name} on each of {counted(len(bundles), 'node')}"


def _free(ray: Any, bundles: Sequence[Mapping[str, float]]) -> str:
    name = _scarce(bundles)
    has, free = (int(resources.get(name, 0)) for resources in (ray.cluster_resources(), ray.available_resources()))
    return f"of {has} {name} in the cluster {free} are free"


def _scarce(bundles: Sequence[Mapping[str, float]]) -> str:
    return "GPU" if "GPU" in bundles[0] else "CPU"
