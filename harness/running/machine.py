"""The machine that a command runs on: its device, and whether ranks can train there. Never imports torch.

Owns the meaning of `--device auto`. Which devices may be used is `engine/hardware.py`'s.
"""

from __future__ import annotations

import importlib.util

from harness.engine.hardware import Device, cuda_devices
from harness.errors import HarnessError


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
