"""The project: where cases and goldens live, and where this machine keeps its state.

Owns the layout of the two folders on disk. It does not read what is in the files (`spec/`, `golden.py`) and imports
nothing heavy: `fp8-harness list` starts here.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
import socket
import time
from pathlib import Path

import msgspec

from harness.errors import HarnessError

STATE_VARIABLE = "FP8_HARNESS_STATE"
KEPT_RUNS = 20  # older stored runs of the same project are removed when a new one starts

# TOML files under cases/ that hold records about cases, not cases.
_RECORD_FILES = frozenset({"known.toml", "required.toml", "quarantine.toml"})


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A root with `cases/` and `golden/`, and the per-user state folder of this machine."""

    root: Path
    state: Path

    @property
    def cases(self) -> Path:
        """Folder of tier files and records."""
        return self.root / "cases"

    @property
    def known(self) -> Path:
        """File of recorded upstream faults; may be absent."""
        return self.cases / "known.toml"

    @property
    def leases(self) -> Path:
        """Folder of device leases: one for all jobs of this user on this machine, whatever project they run."""
        return self.state / "leases" / (socket.gethostname() or "localhost")

    @property
    def runs(self) -> Path:
        """Folder of the stored runs of this project, one folder a run, named so that they sort by time."""
        key = hashlib.sha256(str(self.root).encode()).hexdigest()[:16]
        return self.state / "runs" / key

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers this project has, sorted."""
        return tuple(sorted(path.stem for path in self.cases.glob("*.toml") if path.name not in _RECORD_FILES))

    def case_file(self, name_or_path: str) -> Path:
        """Path of a tier (`pr`) or of a case file (`my/cases.toml`); HarnessError when there is none."""
        if name_or_path.endswith(".toml") or os.sep in name_or_path:
            path = Path(name_or_path)
            if not path.is_file():
                raise HarnessError("there is no such case file.", where=name_or_path, fix="check the path.")
            return path
        if name_or_path not in self.tiers:
            raise HarnessError(
                f"there is no tier of this name in {self.cases}.",
                where=name_or_path,
                fix=_suggest(name_or_path, self.tiers),
            )
        return self.cases / f"{name_or_path}.toml"

    def new_run_folder(self) -> Path:
        """Make and return the folder of a new stored run; removes runs beyond the last `KEPT_RUNS`."""
        folder = self.runs / f"{time.time_ns():020d}-{os.getpid()}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self.state, error) from error
        for old in self.stored_runs()[:-KEPT_RUNS]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def stored_runs(self) -> tuple[Path, ...]:
        """Folders of the stored runs, oldest first."""
        return tuple(sorted(self.runs.iterdir())) if self.runs.is_dir() else ()

    def witness_folder(self) -> Path:
        """Where witness runs are kept; made when the first one is written."""
        return self.state / "witnesses"

    def lease_folder(self) -> Path:
        """Make (if needed) and return the lease folder."""
        try:
            self.leases.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.state, error) from error
        return self.leases


def find_project(root: str | Path | None = None) -> Project:
    """The project to work in: `root`, else the nearest parent of the current folder, else the one in the wheel."""
    if root is not None:
        given = Path(root).resolve()
        if not _is_root(given):
            raise HarnessError(
                "this is not a project root: it has no cases/ folder.",
                where=f"--root {root}",
                fix="name a folder that has cases/ and golden/.",
            )
        return Project(root=given, state=state_folder())
    here = Path.cwd()
    nearest = next((folder for folder in (here, *here.parents) if _has_both(folder)), None)
    return Project(root=nearest or _shipped_root(), state=state_folder())


def state_folder() -> Path:
    """Where this user's leases and stored runs are: `FP8_HARNESS_STATE`, else the user's cache folder."""
    given = os.environ.get(STATE_VARIABLE)
    if given:
        return Path(given).resolve()
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8-harness"
    raise HarnessError("there is no home folder to keep state in.", fix=f"set {STATE_VARIABLE} to a writable folder.")


def is_case_file(path: Path) -> bool:
    """True when `path` is a TOML file with cases, directly in the `cases/` folder of a project."""
    in_cases = path.suffix == ".toml" and path.parent.name == "cases" and _has_both(path.parent.parent)
    return in_cases and path.name not in _RECORD_FILES


def _is_root(folder: Path) -> bool:
    return (folder / "cases").is_dir()


def _has_both(folder: Path) -> bool:
    return _is_root(folder) and (folder / "golden").is_dir()


def _shipped_root() -> Path:
    shipped = Path(__file__).with_name("_project")
    if _is_root(shipped):
        return shipped
    raise HarnessError(
        "found no folder with cases/ and golden/ here or above.",
        where=str(Path.cwd()),
        fix="run inside a project, or name it with --root DIR.",
    )


def _suggest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"use one of {', '.join(known)}." if known else "add a tier file to cases/."


def _unwritable(state: Path, error: OSError) -> HarnessError:
    return HarnessError(
        f"cannot write to the state folder: {error.strerror}.",
        where=str(state),
        fix=f"set {STATE_VARIABLE} to a writable folder.",
    )
