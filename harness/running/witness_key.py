"""The witness key: a digest of all that computes a witness besides its own case.

That is: how ranks are run, the packages they use, the source of the rank program, and the CPU with the limits on its
arithmetic. A file of torch may be edited in place, or be part of an editable install whose version never changes, so
versions are not enough.

Of an installed package, path, size and time of change of every Python file and shared library count, not the bytes:
reading 2 GB of torch would cost more than it saves. So a new installation of the same version makes the kept witnesses
stale, which costs time; an edit that keeps size and time of a file is not seen. Libraries outside of the package, such
as those of CUDA, are not looked at. Of a rank program, the content counts. Imports no package that it looks at.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.engine.hardware import CPUINFO, arithmetic_limits, cpu_kind
from harness.running.plan import DEFAULT_PROGRAM, Plan
from harness.sources import files_digest, installed_version, package_paths, source_digest

PACKAGES = ("torch", "torchao", "numpy")
_HERE = Path(__file__).parents[1]
_OURS = ("worker", "trace", "matrix", "expect")  # the packages of the harness that compute a witness


def witness_key(plan: Plan, *, cpuinfo: Path = CPUINFO) -> str:
    """The key of the witnesses of this plan, on this machine and with what is installed now. Takes about 0.1 s."""
    parts = (
        plan.program,
        plan.device,
        plan.fabric,
        plan.arithmetic,
        str(plan.probed),
        arithmetic_limits(),
        cpu_kind(cpuinfo),
        *sorted({node.cpu for node in plan.capacity.nodes}),
        *(f"{package} {installed_version(package)} {files_digest(package)}" for package in PACKAGES),
        source_digest(_HERE, (path for folder in _OURS for path in (_HERE / folder).rglob("*.py"))),
        _program_digest(plan.program),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _program_digest(program: str) -> str:
    """Over the source of the package, or of the single file, that a rank program is in; empty when it is not found.

    What it imports from elsewhere is not looked at. Our own program is part of our own source.
    """
    if program == DEFAULT_PROGRAM:
        return ""
    found = package_paths(program.partition(".")[0])
    return " ".join(source_digest(place.parent, place.rglob("*.py") if place.is_dir() else [place]) for place in found)
