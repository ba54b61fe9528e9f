"""The machine that a command runs on: its device, whether ranks can train there, and the private parts of torch there.

Never imports torch. Owns the meaning of `--device auto`. Which devices may be used is `engine/hardware.py`'s.
"""

from __future__ import annotations

import importlib.util
import subprocess

import msgspec

from harness.engine.hardware import Device, cuda_devices
from harness.engine.interpreter import child_environ, module_command
from harness.errors import HarnessError
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


def check_rank_packages() -> None:
    """Raises HarnessError where a package that ranks import is not installed; imports none of them."""
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
    check_rank_packages()
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
