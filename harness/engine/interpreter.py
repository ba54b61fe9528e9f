"""New processes of the engine: their command line, environment and start."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

MARK = "FP8_HARNESS_ENGINE"  # environment variable that marks every process an engine starts, so that it can find them

# The child must import the same modules as this process: neither a `harness` folder in the working directory (-P) nor
# another installation. PYTHONPATH is no alternative: every Python program that a rank starts would inherit it.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); name = sys.argv.pop(1); "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)

# One thread per rank: the zygote must be single-threaded when it forks, and ranks share few cores. A program may raise
# the number after the fork.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# `torch.cuda.is_available()`, which torchao calls when it is imported, then asks NVML and makes no CUDA context that a
# fork would break: https://docs.pytorch.org/docs/main/notes/cuda.html#environment-variables.
# CUDA must number GPUs as nvidia-smi does: it sorts them by speed by default.
_DEVICES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# Compilers and Python in ranks speak English in UTF-8: inductor decodes what they say and write as UTF-8, whatever the
# locale of the user.
_LOCALE = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module of the harness in this Python."""
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])  # noqa: PTH100  '' means the working directory
    return [sys.executable, "-P", "-c", _BOOT, search_path, module, *arguments]


def child_environ(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with one compute thread, settings of locale and GPUs, then `extra`."""
    return {**os.environ, **dict.fromkeys(_THREADS, "1"), **_LOCALE, **_DEVICES, **extra}


def start(
    command: Sequence[str], output: IO[bytes], *, environ: Mapping[str, str], fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. It writes to `output` and inherits `fds`. Raises OSError."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        env=child_environ(environ),
        start_new_session=True,
    )
