"""The machine that a command runs on: where its ranks train, whether its GPUs can be used, the parts of torch there.

Never imports torch. A case trains on the GPUs where its ranks fit them and they meet its needs
(`matrix/gpu_needs.toml`), else on the virtual device of the CPU: the meaning of --device, --backend and --slots, here
or on a Ray cluster. Which devices may be used is `engine/hardware.py`'s.
"""

import importlib.util
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.engine.hardware import Capacity, Device, NodeCapacity, capacity_here, cuda_devices
from harness.engine.linux import MACHINES, foreign_system, read_text, refused_call
from harness.engine.processes import child_environ, module_command
from harness.errors import HarnessError
from harness.evidence.verified import provable_levels
from harness.hints import INSTALL_FOR_CPU, START_CONTAINER
from harness.internals import State
from harness.matrix.case import Case
from harness.matrix.rules import Capability, GpuFacts, unmet_needs
from harness.registry import launcher
from harness.request import Arithmetic, Backend, default_arithmetic
from harness.run_options import PlanOptions
from harness.running.environments import last_line
from harness.sources import package_paths
from harness.text import binary_bytes


class TorchBuild(NamedTuple):
    """What the installed torch was built for: versions of CUDA and ROCm, each empty without it."""

    version: str
    cuda: str = ""
    hip: str = ""


def torch_build() -> TorchBuild | None:
    """Return the installed torch, by its file version.py, which is not imported, or None."""
    for folder in package_paths("torch"):
        text = read_text(folder / "version.py")
        values = dict(re.findall(r"(?m)^(__version__|cuda|hip)\b[^=\n]*= '([^']+)'", text))
        return TorchBuild(values.get("__version__", "unknown"), values.get("cuda", ""), values.get("hip", ""))
    return None


class _Cuda(NamedTuple):
    """What a build of torch for a version of CUDA runs on. `since`, `below`: compute capability."""

    driver: tuple[int, ...]
    since: Capability
    below: Capability = (1000, 0)


# By version of CUDA, the longest first. The oldest drivers:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html. The GPUs whose code is in torch's
# wheels: torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC, of torch 2.13.0.
_CUDA = {"12.6": _Cuda((525,), (5, 0), (10, 0)), "12.": _Cuda((525,), (7, 5)), "13.": _Cuda((580,), (7, 5))}


def unusable(node: NodeCapacity, build: TorchBuild | None) -> str:
    """Return why ranks with this build of torch cannot train on the GPUs of a node; empty if they can."""
    return next(_unusable(node, build), "")


def _unusable(node: NodeCapacity, build: TorchBuild | None) -> Iterator[str]:
    if build is None:
        yield "torch is not installed"
        return
    if build.hip:
        yield not_nvidia(build)
    if not build.cuda:
        yield f"torch {build.version} was built without CUDA"
    needs = next((needs for version, needs in _CUDA.items() if build.cuda.startswith(version)), None)
    if needs is None:
        yield f"which driver CUDA {build.cuda} of torch {build.version} needs is not known here"
        return
    if tuple(map(int, re.findall(r"\d+", node.driver))) < needs.driver:
        have, least = node.driver or "of an unknown version", ".".join(map(str, needs.driver))
        yield f"the driver is {have}, and CUDA {build.cuda} of torch {build.version} needs {least} or newer"
    if node.capability is None:
        yield "nvidia-smi does not show their compute capability"
    elif not needs.since <= node.capability < needs.below:
        yield "torch {} for CUDA {} has no code for compute capability {}.{}".format(*build[:2], *node.capability)


def not_nvidia(build: TorchBuild) -> str:
    """Return why GPUs of a build for ROCm are not used."""
    return f"torch {build.version} is for ROCm {build.hip}, and AMD GPUs, with their float8_e4m3fnuz, are not supported"


def check_ranks(*, packages: bool = True) -> None:
    """Raise HarnessError if ranks cannot run: on another system, without disk space, or without what they import.

    Every command that starts ranks comes through here. `packages`: False for a rank program of the user's own.
    """
    if system := foreign_system():
        raise HarnessError(
            f"ranks need Linux on {' or '.join(MACHINES)}, and this is {system}.",
            fix=f"run it in a container: `{START_CONTAINER}`; there `{INSTALL_FOR_CPU}`, and the same command again.",
        )
    if refusal := refused_call():
        raise HarnessError(
            f"ranks need Linux 5.3 or later, and this one ({platform.release()}) refuses a system call: {refusal}.",
            fix="use a newer kernel, or a sandbox that allows pidfd_open and prctl.",
        )
    _check_space(Path(tempfile.gettempdir()))
    if packages:
        _check_packages()


# Tier smoke with `-j 2` needs 40 MB, a case of 8 ranks of a tiny model 8 MB.
_MIN_FREE_BYTES = 64 << 20


def _check_space(folder: Path) -> None:
    """Ranks share memory by files in the folders of jobs; on a full disk the kernel ends them with SIGBUS."""
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise HarnessError(
            f"only {binary_bytes(free)} are free, and ranks share memory by files there: a run needs at least "
            f"{binary_bytes(_MIN_FREE_BYTES)}.",
            where=str(folder),
            fix="set TMPDIR to a folder with more space.",
        )


def _check_packages() -> None:
    """Import none of them."""
    missing = [name for name in ("torch", "torchao") if importlib.util.find_spec(name) is None]
    if missing:
        raise HarnessError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and ranks cannot train "
            "without.",
            fix=f"`{INSTALL_FOR_CPU}`; without the index, pip takes torch's build for CUDA, of several GB.",
        )


_TIMEOUT_S = 300.0  # importing torch and inductor takes 5 s, and much more on a busy machine
_STATES = msgspec.json.Decoder(State)


def internals_here() -> State:
    """Return the state of every part. Raises HarnessError if torch or torchao cannot be imported."""
    _check_packages()
    try:
        done = subprocess.run(
            module_command("harness.worker.main", []),
            env=child_environ({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"torch was not imported within {_TIMEOUT_S:g} s.", where="explain --list internals"
        ) from None
    except subprocess.CalledProcessError as error:
        last = last_line(error.stderr.decode(errors="replace"))
        raise HarnessError(f"torch and torchao cannot be asked: {last}", where="explain --list internals") from error
    return _STATES.decode(done.stdout)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan has on one kind of device."""

    device: Device
    backend: Backend
    arithmetic: Arithmetic
    capacity: Capacity
    jobs: int


class Choice(NamedTuple):
    """Where a case trains. `why`: not on a GPU; empty there."""

    device: Device
    arithmetic: Arithmetic
    why: str = ""


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and the CPU of a run. `may_be_exact`: the arithmetic is chosen too, because none was asked for."""

    gpus: Side
    cpu: Side
    may_be_exact: bool

    def of(self, device: Device) -> Side:
        return self.gpus if device == "cuda" else self.cpu

    def choice(self, case: Case) -> Choice:
        """Return where a case trains."""
        one_node = case.train.resume != "none"  # for its checkpoint
        why, exact = obstacle(case, self.gpus, one_node=one_node)
        if not why:
            return Choice("cuda", self.gpus.arithmetic)
        if exact and self.may_be_exact:
            gpus = msgspec.structs.replace(self.gpus, arithmetic="exact")
            why, _ = obstacle(case, gpus, one_node=one_node)
            if not why:
                return Choice("cuda", "exact")
        return Choice("cpu", self.cpu.arithmetic, why)


class Obstacle(NamedTuple):
    """Why a case cannot run on one side; empty if it can. `exact`: the exact matmul would do without."""

    why: str
    exact: bool = False


def obstacle(case: Case, side: Side, *, one_node: bool) -> Obstacle:
    """Return what prevents a case from running there; `one_node`: its ranks need to share one."""
    if side.device == "cuda":
        peers = {node.peers for node in side.capacity.nodes}
        facts = GpuFacts(capability=side.capacity.nodes[0].capability, peers=peers.pop() if len(peers) == 1 else False)
        unmet = sorted(unmet_needs(case, facts, exact=side.arithmetic == "exact"), key=lambda need: need.exact)
        if unmet:
            return Obstacle(unmet[0].reason, exact=unmet[0].exact)
    most = side.capacity.largest if one_node else side.capacity.total
    if case.world_size > most:
        return Obstacle("fewer GPUs than ranks" if side.device == "cuda" else "fewer slots than ranks")
    return Obstacle("")


# What collectives of a device can run on, the default first.
BACKENDS: Mapping[Device, tuple[Backend, ...]] = {"cpu": ("shared", "gloo"), "cuda": ("nccl",)}
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
    """Return where these options have ranks train, on this machine or the Ray `cluster` of this address.

    Raises HarnessError for a device that is not there, and for a backend of another device.
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
    """Return the device that options force, and by which; None if --device auto may choose."""
    has_gpus = _has_gpus(cluster)
    if asked.device == "cpu":
        return "cpu", "--device cpu"
    if asked.device == "cuda":
        if not has_gpus and not cluster:
            raise HarnessError("there is no CUDA device here.", where="--device cuda", fix="use --device cpu.")
        return "cuda", ""
    if asked.backend in (None, "auto"):
        return None, ""
    on_cpu = asked.backend in BACKENDS["cpu"] or not has_gpus
    return ("cpu", f"--backend {asked.backend}") if on_cpu else ("cuda", "")


def _has_gpus(cluster: str) -> bool:
    return bool(launcher("ray").has_gpus(cluster) if cluster else cuda_devices())


def _usable_gpus(asked: PlanOptions, cluster: str) -> tuple[Side | None, str]:
    """Return the GPUs that ranks can train on; or why these are not used, which is empty without a GPU."""
    build = torch_build()
    if not _has_gpus(cluster):
        return None, not_nvidia(build) if build is not None and build.hip else ""
    try:
        gpus = _side("cuda", msgspec.structs.replace(asked, backend=None), cluster)
    except HarnessError as error:  # of several kinds, or without a name
        return None, f"{error.what.partition('. ')[0]}; {(error.fix or '').rstrip('.')}"
    first = gpus.capacity.nodes[0]
    why = unusable(first, build)
    return (None, f"{why}, so {gpus.capacity.words} cannot be used") if why else (gpus, "")


def _provable(capacity: Capacity) -> bool:
    capability = capacity.nodes[0].capability
    return capability is not None and bool(provable_levels(capability, capacity.largest))


def _side(device: Device, asked: PlanOptions, cluster: str) -> Side:
    backend = _resolve_backend(asked.backend or "auto", device)
    if cluster:
        capacity = launcher("ray").cluster_capacity(cluster, device, asked.slots)
    else:
        capacity = Capacity(nodes=(capacity_here(device, asked.slots),))
    return Side(
        device=device,
        backend=backend,
        arithmetic=asked.arithmetic or default_arithmetic(device),
        capacity=capacity,
        jobs=asked.jobs * len(capacity.nodes),
    )


def _resolve_backend(asked: str, device: Device) -> Backend:
    """Return the backend that `auto`, `shared`, `gloo` or `nccl` means here; HarnessError for one of another device."""
    offered = BACKENDS[device]
    for backend in offered:
        if asked in ("auto", backend):
            return backend
    raise HarnessError(
        f"ranks on {device} cannot use it: {_WHY_NOT[asked]}.",
        where=f"--backend {asked}",
        fix=f"use --backend {' or '.join(offered)}{'' if device == 'cuda' else ', or --device cuda'}.",
    )
