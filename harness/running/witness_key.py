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

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from harness.running.machine import CPUINFO, arithmetic_limits, cpu_kind, installed_version
from harness.running.plan import DEFAULT_PROGRAM, Plan

PACKAGES = ("torch", "torchao", "numpy")
_CODE = re.compile(r"\.py$|\.so(\.[0-9.]+)?$")
_HERE = Path(__file__).parents[1]
_OURS = ("worker", "trace", "matrix", "expect")  # the packages of the harness that compute a witness


def witness_key(plan: Plan, *, cpuinfo: Path = CPUINFO) -> str:
    """The key of the witnesses of this plan, on this machine and with what is installed now. Takes about 0.1 s."""
    parts = (
        plan.program,
        plan.device,
        *sorted(plan.probes),
        arithmetic_limits(),
        cpu_kind(cpuinfo),
        *(f"{package} {installed_version(package)} {files_digest(package)}" for package in PACKAGES),
        source_digest(_HERE, (path for folder in _OURS for path in (_HERE / folder).rglob("*.py"))),
        _program_digest(plan.program),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class InstalledSource(NamedTuple):
    """Where a package is, and what its Python files are: equal digests are equal sources, on any machine."""

    folder: Path
    digest: str


def installed_source(package: str) -> InstalledSource | None:
    """The source of an installed package, without importing it; None when there is none. Reads every Python file."""
    places = _places(package)
    if not places:
        return None
    return InstalledSource(places[0], source_digest(places[0], places[0].rglob("*.py")))


def files_digest(package: str, folders: Sequence[str] = ()) -> str:
    """Over path, size and time of change of the code files of an installed package; empty when there is none."""
    found = [
        (path[len(folder) :], status.st_size, status.st_mtime_ns)
        for folder in map(str, _places(package, folders))
        for path, status in _code_files(folder)
    ]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def _code_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every Python file and shared library at or below `folder`. Links to folders are not entered.

    A file or folder that cannot be read is left out.
    """
    if os.path.isfile(folder):  # noqa: PTH113  a module of a single file
        yield folder, os.stat(folder)  # noqa: PTH116
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                yield from _code_files(entry.path)
        elif _CODE.search(entry.name):
            try:
                yield entry.path, entry.stat()
            except OSError:
                continue


def _program_digest(program: str) -> str:
    """Over the source of the package, or of the single file, that a rank program is in; empty when it is not found.

    What it imports from elsewhere is not looked at. Our own program is part of our own source.
    """
    if program == DEFAULT_PROGRAM:
        return ""
    places = _places(program.partition(".")[0])
    return " ".join(source_digest(place.parent, place.rglob("*.py") if place.is_dir() else [place]) for place in places)


def source_digest(root: Path, files: Iterable[Path]) -> str:
    """Over the paths, relative to `root`, and the bytes of these files. Of an unreadable one, only the path counts."""
    state = hashlib.sha256()
    for path in sorted(files):
        state.update(str(path.relative_to(root)).encode())
        with contextlib.suppress(OSError):  # such as the dangling link by which an editor marks an open file
            state.update(path.read_bytes())
    return state.hexdigest()


def top_level_spec(name: str, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Where a top-level package or module is, in `folders` too, without importing it; None when it is nowhere."""
    try:
        return importlib.util.find_spec(name) or PathFinder.find_spec(name, list(folders))
    except (ImportError, ValueError):
        return None


def _places(name: str, folders: Sequence[str] = ()) -> list[Path]:
    """The folders of a top-level package, or the file of a top-level module, without importing it; empty if none.

    Looked for in `folders` too.
    """
    spec = top_level_spec(name, folders)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder).resolve() for folder in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.has_location and spec.origin is not None else []
