"""The machine that a command runs on: whether ranks can train on its GPUs, and the private parts of torch there.

Never imports torch. Which devices may be used is `engine/hardware.py`'s, which cases run on them `device_choice.py`'s.
"""

import importlib.util
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.engine.hardware import NodeCapacity
from harness.engine.linux import MACHINES, foreign_system, read_text, refused_call
from harness.engine.processes import child_environ, module_command
from harness.errors import HarnessError
from harness.hints import INSTALL_FOR_CPU, START_CONTAINER
from harness.internals import State
from harness.matrix.rules import Capability
from harness.running.environments import last_line
from harness.sources import package_paths
from harness.text import binary_bytes


class TorchBuild(NamedTuple):
    """What the installed torch was built for: versions of CUDA and ROCm, each empty without it."""

    version: str
    cuda: str = ""
    hip: str = ""


def torch_build() -> TorchBuild | None:
    """The installed torch, by its file version.py, which is not imported; None where there is none."""
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
    """Why ranks with this build of torch cannot train on the GPUs of a node; empty where they can."""
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
    """Why GPUs of a build for ROCm are not used."""
    return f"torch {build.version} is for ROCm {build.hip}, and AMD GPUs, with their float8_e4m3fnuz, are not supported"


def check_ranks(*, packages: bool = True) -> None:
    """Raises HarnessError where ranks cannot run: on another system, without disk space, or without what they import.

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
            fix="use a newer kernel, or a sandbox or emulator that allows pidfd_open and prctl.",
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
    """Imports none of them."""
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
    """The state of every part. Raises HarnessError where torch or torchao cannot be imported."""
    _check_packages()
    try:
        done = subprocess.run(
            module_command("harness.worker.process.internals", []),
            env=child_environ({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(f"torch was not imported within {_TIMEOUT_S:g} s.", where="explain --internals") from None
    except subprocess.CalledProcessError as error:
        last = last_line(error.stderr.decode(errors="replace"))
        raise HarnessError(f"torch and torchao cannot be asked: {last}", where="explain --internals") from error
    return _STATES.decode(done.stdout)
