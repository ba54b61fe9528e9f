"""Warns of a scaled matmul that takes long on a CPU, before it begins."""

import functools
import sys
import time

import torch

from harness.plugins.exec.worker.script import line_of_frame
from harness.worker.dispatch_hooks.hook import unobserved

_LARGE = 1 << 34  # floating-point operations: a second or two
_LONG_S = 10.0
_TRIED = 512  # rows and columns
_told = set[str]()


def warn(a: torch.Tensor, b: torch.Tensor, *_: torch.Tensor) -> None:
    """Say where a matmul will take more than ten seconds, and for how long, once for a line of the script."""
    operations = 2 * a.numel() * b.shape[-1]
    if operations < _LARGE or (seconds := operations * _seconds()) < _LONG_S:
        return
    line = line_of_frame(sys._getframe(1)) or "a package"
    if line not in _told:
        _told.add(line)
        sizes = f"{list(a.shape)} by {list(b.shape)}"
        said = f"a scaled matmul of {sizes} takes about {seconds:.0f} s here, in float64."
        sys.stderr.write(f"exec: {line}: {said} Fix: give the script smaller sizes.\n")


@functools.cache
def _seconds() -> float:
    """Return what one operation of a matmul in float64 takes here."""
    with unobserved():
        square = torch.ones(_TRIED, _TRIED, dtype=torch.float64)
        started_s = time.perf_counter()
        _ = square @ square
    return (time.perf_counter() - started_s) / (2 * _TRIED**3)
