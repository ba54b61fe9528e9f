"""What the private parts of torch and torchao are here, asked of a process of its own: only ranks import torch."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from harness.engine.interpreter import child_environ, module_command
from harness.errors import HarnessError
from harness.internals import State
from harness.running.environments import last_line
from harness.running.machine import check_rank_packages

_TIMEOUT_S = 300.0  # importing torch and inductor takes 5 s, and much more on a busy machine
_STATES = msgspec.json.Decoder(State)


def internals_here() -> State:
    """The state of every part. Raises HarnessError where torch or torchao cannot be imported."""
    check_rank_packages()
    try:
        done = subprocess.run(
            module_command(sys.executable, "harness.worker.internals", []),
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
