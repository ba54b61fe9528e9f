"""The machine that a command runs on: its device, whether ranks can train there, and the private parts of torch there.

Never imports torch. Owns the meaning of `--device auto`. Which devices may be used is `engine/hardware.py`'s.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess

import msgspec

from harness.engine.hardware import Device, cuda_devices
from harness.engine.interpreter import child_environ, module_command
from harness.engine.linux import MACHINES, foreign_system, refused_call
from harness.errors import HarnessError
from harness.hints import INSTALL_FOR_CPU, START_CONTAINER
from harness.internals import State
from harness.running.environments import last_line


def resolve_device(asked: str) -> Device:
    """The device that `auto`, `cpu` or `cuda` means here; HarnessError for `cuda` on a machine without one."""
    if asked == "cpu":
        return "cpu"
    if cuda_devices():
        return "cuda"
    if asked == "cuda":
        raise HarnessError("there is no CUDA device here.", where="--device cuda", fix="use --device cpu.")
    return "cpu"


def check_ranks(*, packages: bool = True) -> None:
    """Raises HarnessError where ranks cannot run: the system is another one, or a package that they import is missing.

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
    if packages:
        _check_packages()


def _check_packages() -> None:
    """Imports none of them."""
    missing = [name for name in ("torch", "torchao") if importlib.util.find_spec(name) is None]
    if missing:
        raise HarnessError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and ranks cannot train "
            "without.",
            fix="pip install 'fp8-harness[train]'",
        )


_TIMEOUT_S = 300.0  # importing torch and inductor takes 5 s, and much more on a busy machine
_STATES = msgspec.json.Decoder(State)


def internals_here() -> State:
    """The state of every part. Raises HarnessError where torch or torchao cannot be imported."""
    _check_packages()
    try:
        done = subprocess.run(
            module_command("harness.worker.internals", []),
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
