"""How the engine starts a Python module in a new process. Argument lists and environments only, no process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

MARK = "FP8_HARNESS_ENGINE"  # in the environment of everything that an engine starts, so that it can find it again

# The child must import what this process would: neither a `harness` folder in the working directory (-P) nor another
# installation. PYTHONPATH would do that to every other Python program that a rank starts, too.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); name = sys.argv.pop(1); "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)

# One thread per rank: the warm process must be single-threaded when it forks, and ranks share few cores. A program
# that wants more sets its own number after the fork.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def module_command(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a module of ours. Another interpreter than this one uses its own search path."""
    if python != sys.executable:
        return [python, "-P", "-m", module, *arguments]
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])  # noqa: PTH100  '' is the folder here
    return [python, "-P", "-c", _BOOT, search_path, module, *arguments]


def child_environ(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns our environment with one compute thread per process and `extra` on top."""
    return {**os.environ, **dict.fromkeys(_THREADS, "1"), **extra}
