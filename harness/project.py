"""The project: the folder of cases and goldens, and the state folder of this machine.

Defines their layout; `matrix/` and `evidence/` read the files. Cheap to import, because `fp8-harness list` needs it.
The tiers of the package belong to every project; a file of the same name in the project comes first.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from harness.durable import alone_in
from harness.engine.hardware import host_name
from harness.errors import HarnessError
from harness.evidence.sealed import own_root
from harness.matrix.axes import suggestion

STATE_VARIABLE = "FP8_HARNESS_STATE"

_SHIPPED = Path(__file__).with_name("_project")  # in a wheel

# TOML files in cases/ that contain records about cases instead of cases.
_RECORD_FILES = frozenset({"known.toml", "required.toml", "quarantine.toml"})


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A root with `cases/` and `golden/`, and the per-user state folder of this machine."""

    root: Path
    state: Path
    own: bool = True  # False: the package's, because no project is at or above the working directory

    @property
    def is_shipped(self) -> bool:
        """Return True if nothing is stored: in an installed package, and without a project at or above the folder."""
        return not self.own or self.root == _SHIPPED

    def check_writable(self) -> None:
        """Raise HarnessError if goldens, evidence and chosen cases cannot be stored: in the package."""
        if self.is_shipped:
            raise HarnessError(
                "no project is here or above, and nothing is stored in the package.",
                where=str(Path.cwd()),
                fix="make one here by `mkdir cases golden`, or give --root DIR.",
            )

    @property
    def cases(self) -> Path:
        return self.root / "cases"

    @property
    def known(self) -> Path:
        """Return the file of recorded upstream faults; may not exist."""
        return self.cases / "known.toml"

    @property
    def quarantine(self) -> Path:
        """Return the file of quarantined cases; may not exist."""
        return self.cases / "quarantine.toml"

    @property
    def shipped(self) -> Path:
        """Return the root of the project of the package, in a wheel or in a clone."""
        return own_root()

    @property
    def shipped_known(self) -> Path:
        """Return the file of recorded upstream faults of the package; may not exist."""
        return self.shipped / "cases" / "known.toml"

    @property
    def runs(self) -> Path:
        """The folder of the stored runs of this project: one file per run, numbered in the order of storing."""
        key = hashlib.sha256(str(self.root).encode()).hexdigest()[:16]
        return self.state / "runs" / key

    @property
    def imported(self) -> Path:
        """The folder of the runs of other machines that were imported into this project: one file per run."""
        return self.state / "imported" / self.runs.name

    @property
    def own_tiers(self) -> tuple[str, ...]:
        """Return the names of the tiers in `cases/` of the project, sorted."""
        return _tiers_in(self.cases)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the names of all tiers that can be run here, sorted: the project's and the package's."""
        return tuple(sorted({*self.own_tiers, *_tiers_in(self.shipped / "cases")}))

    @property
    def bugs(self) -> Path:
        """Return the folder of bug files, whose cases are run by its name, like a tier; may not exist."""
        return self.cases / "bugs"

    def case_file(self, name_or_path: str) -> Path:
        """Return the path of a tier (`pr`), of a case file, or of a folder of bugs. HarnessError if it does not exist.

        Of a name that both the project and the package have, the project's.
        """
        if name_or_path.endswith(".toml") or os.sep in name_or_path:
            path = Path(name_or_path)
            if not path.is_file() and path.resolve() not in (self.bugs, self.shipped / "cases" / "bugs"):
                raise HarnessError("this case file does not exist.", where=name_or_path, fix="check the path.")
            return path
        found = self._named(name_or_path)
        if not found:
            raise HarnessError(
                "this is not a tier, a case id or a .toml file.",
                where=name_or_path,
                fix=suggestion(name_or_path, self.tiers) if self.tiers else "add a tier file to cases/.",
            )
        return found[0]

    def of_package(self, path: Path) -> bool:
        """Return True for a case file or folder of bugs of the package that this project uses but does not hold."""
        return self.root != self.shipped and path.resolve().is_relative_to((self.shipped / "cases").resolve())

    def replaced_tiers(self, names: Iterable[str]) -> tuple[str, ...]:
        """A sentence for each of these names that means a file of the project although the package has it too."""
        both = {name: found[0] for name in names if len(found := self._named(name)) > 1}
        return tuple(
            f"{name} is {path.relative_to(self.root)} of this project, not the tier of the package."
            for name, path in both.items()
        )

    def _named(self, name: str) -> list[Path]:
        """Return the tier files or folders of bugs of this name: the project's, then the package's."""
        folders = dict.fromkeys((self.cases, self.shipped / "cases"))
        if name == self.bugs.name:
            return [folder / name for folder in folders if (folder / name).is_dir()]
        return [folder / f"{name}.toml" for folder in folders if name in _tiers_in(folder)]

    def new_run(self) -> Path:
        """Return a new, empty file for a run of this machine, which is the last one now: no clock decides that.

        It is not there on a full disk, which must not end the run.
        """
        with self.alone():
            for number in itertools.count(self._next_number()):
                path = self.runs / f"{number:08d}.jsonl"
                with contextlib.suppress(OSError):
                    path.touch(exist_ok=False)
                    break
                if not path.exists():
                    break
        return path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process adds a run to this project."""
        with alone_in(self._made(self.runs)):
            yield

    def new_import(self, digest: str) -> Path | None:
        """Return the file for imported results of this digest; None if they are there. Ask `alone`."""
        if any(path.stem.endswith(f"-{digest}") for path in self.imported_runs()):
            return None
        return self._made(self.imported) / f"{self._next_number():08d}-{digest}.jsonl"

    def _next_number(self) -> int:
        return 1 + max(map(number_of_run, (*self.stored_runs()[-1:], *self.imported_runs()[-1:])), default=0)

    def stored_runs(self) -> tuple[Path, ...]:
        """Return the files of the stored runs of this machine, in the order of storing."""
        return _numbered(self.runs)

    def imported_runs(self) -> tuple[Path, ...]:
        return _numbered(self.imported)

    def witness_folder(self) -> Path:
        """Return the folder of stored reference runs; created with the first one."""
        return self.state / "references"

    def lease_folder(self) -> Path:
        """Return the folder of device leases, shared by all jobs of this user on this machine; created if needed."""
        return self._made(leases_in(self.state))

    def _made(self, folder: Path) -> Path:
        """Return the folder, which is there now. Raises `HarnessError` where nothing can be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot write to the state folder: {error.strerror}."
            fix = f"set {STATE_VARIABLE} to a writable folder."
            raise HarnessError(what, where=str(self.state), fix=fix) from error
        return folder


def number_of_run(path: Path) -> int:
    """Return the number by which the file of a run is in order; 0 for a file that has none, which nobody stored."""
    digits = path.stem.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


def _numbered(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.jsonl"), key=lambda path: (number_of_run(path), path.name)))


def find_project(root: str | Path | None = None, files: Iterable[str] = ()) -> Project:
    """Return the project at `root`, else at or above the working directory or one of `files`, else the package's."""
    if root is not None:
        given = Path(root).resolve()
        if not _is_root(given):
            raise HarnessError(
                "this is not a project root: it has no cases/ folder.",
                where=f"--root {root}",
                fix="give a folder that has cases/ and golden/.",
            )
        return Project(root=given, state=state_folder())
    here = [Path.cwd(), *(Path(file).resolve() for file in files if file.endswith(".toml"))]
    nearest = next((folder for start in here for folder in (start, *start.parents) if is_project(folder)), None)
    return Project(root=nearest or own_root(), state=state_folder(), own=nearest is not None)


def leases_in(state: Path) -> Path:
    """Return the folder of device leases in a state folder, which machines may share."""
    return state / "leases" / host_name()


def builds_folder() -> Path:
    """Return the folder of the modules that stand for functions of tests, so that ranks can import them."""
    return state_folder() / "builds"


def state_folder() -> Path:
    """Return the folder of leases and stored runs: `FP8_HARNESS_STATE`, else the cache folder of the user."""
    given = os.environ.get(STATE_VARIABLE)
    if given:
        return Path(given).resolve()
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8-harness"
    raise HarnessError("cannot find a home folder to keep state in.", fix=f"set {STATE_VARIABLE} to a writable folder.")


def is_case_file(path: Path) -> bool:
    """Return True if `path` is a TOML file with cases, directly in the `cases/` folder of a project."""
    in_cases = path.suffix == ".toml" and path.parent.name == "cases" and is_project(path.parent.parent)
    return in_cases and path.name not in _RECORD_FILES


def _is_root(folder: Path) -> bool:
    return (folder / "cases").is_dir()


def is_project(folder: Path) -> bool:
    """Return True for a folder with `cases/` and `golden/`."""
    return _is_root(folder) and (folder / "golden").is_dir()


def _tiers_in(cases: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in cases.glob("*.toml") if path.name not in _RECORD_FILES))
