"""Environments that run the same cases: a virtual environment of a user, or one with another version of a package.

What an environment has itself comes first, then every other package of the environment that runs; the harness is always
the one that runs, so none needs to have it installed. torch is installed with all of its libraries, which are of one
version with it.
"""

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from msgspec.structs import replace
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.durable import take_lock
from harness.errors import HarnessError
from harness.jsonform import from_json
from harness.result import RunResult
from harness.run_options import AppOptions
from harness.running.stored import read_results
from harness.sources import installed_version

HARNESS = Path(__file__).parents[2]  # what the environments run is the harness that runs
CHECKOUT = [str(HARNESS)] if (HARNESS / "pyproject.toml").is_file() else []  # has no package that hides others
_PACKAGES = ("torch", "torchao", "torchtitan", "numpy")  # come from the environment of the user if it has them
_LIBRARIES = re.compile(r"torch|triton|pytorch-triton|(nvidia|cuda|intel)-.*")  # which are not held at their versions

Note = Callable[[str], None]


class NamedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment under the name of its runs. `folder`: the one given by `run --env`; None for this environment."""

    name: str
    python: Path
    folder: Path | None = None
    cwd: Path | None = None  # None: this one
    root: Path | None = None  # of the project; None: what the options say
    python_path: tuple[str, ...] | None = None  # None: the PYTHONPATH of this process


class NotInstalled(HarnessError):
    """A version cannot be installed."""


class Versions(msgspec.Struct, frozen=True):
    """The environments of the versions of one package."""

    package: str
    folder: Path  # of those that are made
    index: str | None = None  # the URL of an index, or a folder of wheels; None: the index of uv or pip
    given: Mapping[str, Path] = {}  # virtual environments of a user by version, or by any other name
    note: Note = lambda text: None

    def environment(self, version: str) -> NamedEnvironment:
        """Return the environment with this version, made and kept where there is none.

        Raises NotInstalled, or HarnessError if the environment of a user has another version.
        """
        name, path = f"{self.package}-{version}", self.given.get(version)
        if path is not None:
            python = python_over(path, self.folder)
            self._check(version, path)
            return NamedEnvironment(name=name, python=python, folder=path)
        if is_release(installed_version(self.package) or "", version):
            return NamedEnvironment(name=name, python=Path(sys.executable))
        home = self.folder / f"{canonicalize_name(self.package)}-{version}"
        # The paths again, because another checkout may have made it.
        python = _environment(home, [str(HARNESS), *_our_packages()], lambda: self._install(home, version))
        return NamedEnvironment(name=name, python=python, folder=home)

    def _check(self, version: str, path: Path) -> None:
        """Raise HarnessError if the environment of a user has not this version."""
        folders = [str(_site_packages(path)), *site.getsitepackages()]
        found = next(iter(distributions(name=self.package, path=folders)), None)
        if found is None or (is_version(version) and not is_release(found.version, version)):
            what = f"it has {self.package} {found.version}, not {version}." if found else f"it has no {self.package}."
            raise HarnessError(what, where=f"--env {version}={path}", fix="give one that has this version.")

    def _install(self, home: Path, version: str) -> None:
        """Install a version with uv, or pip. The libraries of torch come along, everything else as it is here."""
        self.note(f"{self.package} {version}: installing it into {home}, which is kept")
        words = ["--no-deps"]
        if self.package == "torch":  # its libraries change with every version
            (home / "constraints.txt").write_text("".join(f"{line}\n" for line in _held()))
            words = ["--constraint", str(home / "constraints.txt")]
        if self.index is not None:
            words += ["--index-url", self.index] if "://" in self.index else ["--no-index", "--find-links", self.index]
        command = [*_installer(home / "bin" / "python"), *words, f"{self.package}=={version}"]
        said: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout or ():
                said.append(line)
                self.note(f"  {line.strip()}")
        if process.returncode != 0:
            last = last_line("".join(said)) or f"{command[0]} ended with {process.returncode}"
            fix = "check the version and the index, or give a virtual environment that has it."
            raise NotInstalled(
                f"it cannot be installed: {last.removesuffix('.')}.", where=f"{self.package}=={version}", fix=fix
            )


def _installer(python: Path) -> list[str]:
    """Return what installs packages for this Python: uv where it is, on PATH or installed here, else pip."""
    uv = shutil.which("uv", path=os.pathsep.join((os.environ.get("PATH", ""), sysconfig.get_path("scripts"))))
    if uv is not None:
        return [uv, "pip", "install", "--python", str(python)]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    return [*pip, "--progress-bar", "off", "--only-binary", ":all:"]


def _held() -> list[str]:
    """Return every package of the environment that runs with its version, without torch and the libraries of torch."""
    versions = {canonicalize_name(package.name): package.version for package in distributions() if package.name}
    return sorted(f"{name}=={version}" for name, version in versions.items() if not _LIBRARIES.fullmatch(name))


def is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def is_release(installed: str, version: str) -> bool:
    """Return True if this is the version installed: "2.13.0" stands for "2.13.0+cpu", not for "2.13.0+git12"."""
    if not is_version(installed) or not is_version(version):
        return False
    here, asked = Version(installed), Version(version)
    return here == asked or (Version(here.public) == asked and not (here.local or "").startswith("git"))


def python_over(path: Path, folder: Path) -> Path:
    """Return the Python of an environment that has what the virtual environment at `path` has, and the harness.

    Raises HarnessError if `path` is none, is of another Python, or hides a package behind its own hook.
    """
    where = f"--env {path}"
    lines = [*CHECKOUT, _site_line(str(_site_packages(path))), str(HARNESS), *_our_packages()]
    python = _environment(folder / f"over-{sha256(repr(lines).encode()).hexdigest()[:16]}", lines)
    names = (*_PACKAGES, "harness")
    theirs, ours = origins(path.resolve() / "bin" / "python", names), origins(python, names)
    if ours.pop("harness") != str(HARNESS / "harness" / "__init__.py"):
        fix = "uninstall it there: the harness that runs is used."
        raise HarnessError("it has its own harness.", where=where, fix=fix)
    for name, origin in theirs.items():
        if origin and ours.get(name, origin) != origin:
            what = f"{name} would be imported from {ours[name]}, not from {origin}."
            fix = f"install {name} there without -e, or --config-settings editable_mode=compat."
            raise HarnessError(what, where=where, fix=fix)
    return python


def _environment(home: Path, lines: Sequence[str], install: Callable[[], None] = lambda: None) -> Path:
    """Return the Python of the environment at `home`, made where there is none.

    It imports from its own packages first, then from these lines of a path file, in their order.
    """
    with _alone(home):
        if not (home / ".ready").exists():
            venv.create(home, with_pip=False, symlinks=True, clear=True)
            try:
                install()
            except HarnessError:
                shutil.rmtree(home)
                raise
            (home / ".ready").touch()
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        (packages / "of_the_harness.pth").write_text("".join(f"{line}\n" for line in lines))
    return home / "bin" / "python"


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Waits for other processes that make the same environment."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as file:
        take_lock(file, wait=True)
        yield


def _our_packages() -> Iterable[str]:
    return map(_site_line, site.getsitepackages())


def _site_line(folder: str) -> str:
    """Return the line of a path file that adds a folder of packages with what `pip install -e` installed there."""
    return f"import site; site.addsitedir({folder!r})"


def _site_packages(path: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = path.resolve() / "lib" / version / "site-packages"
    if not (path / "pyvenv.cfg").is_file():
        fix = "name a folder that `python -m venv` made."
        raise HarnessError("this is no virtual environment.", where=f"--env {path}", fix=fix)
    if not packages.is_dir():
        raise HarnessError(
            f"it has no packages of {version}, with which this harness runs.",
            where=f"--env {path}",
            fix=f"make it with {version}, or run there with --name, and compare the stored runs.",
        )
    return packages


def origins(python: Path, names: Sequence[str], python_path: Sequence[str] = ()) -> dict[str, str]:
    """Return the file that each package would be imported from, without importing it, or nothing."""
    code = (
        "import importlib.util, json, sys; found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}; "
        "print(json.dumps({name: spec.origin or '' if spec else '' for name, spec in found.items()}))"
    )
    command, paths = [str(python), "-P", "-c", code, *names], os.pathsep.join(python_path)
    environ = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environ)
    if done.returncode != 0:
        what = f"its Python does not start: {last_line(done.stderr.decode(errors='replace'))}."
        raise HarnessError(what, where=str(python), fix="make the environment again.")
    return from_json(done.stdout, dict[str, str])


def run_in_environment(
    place: NamedEnvironment, words: Sequence[str], folder: Path, *, given: AppOptions, reports: bool = True
) -> RunResult:
    """Return the results of `run` with these words in another environment, stored under its name.

    `given`: the options before the command, of which a place may have its own root. What it says goes to where this
    process says it; without `reports` it is silent. Raises HarnessError if it ran nothing.
    """
    file = (folder / f"{place.name}.jsonl").resolve()
    file.unlink(missing_ok=True)
    given = given if place.root is None else replace(given, root=str(place.root))
    asked = (*given.words, "run", *words, "--name", place.name, "--json", str(file))
    command = [str(place.python), "-P", "-m", "harness", *asked]
    paths = {} if place.python_path is None else {"PYTHONPATH": os.pathsep.join(place.python_path)}
    with TemporaryFile("w+") as kept:
        said = sys.stderr if reports else kept
        with subprocess.Popen(command, stdout=said, stderr=said, cwd=place.cwd, env={**os.environ, **paths}) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the run got it too, and ends by itself
                code = process.wait()
        kept.seek(0)
        last = last_line(kept.read())
    if not file.exists():
        what = f"the run there ended with {code}{f': {last}' if last else ''}"
        fix = "look for what this environment lacks." if last else "see what it says above."
        raise HarnessError(f"{what.removesuffix('.')}.", where=place.name, fix=fix)
    run = read_results(file)
    if place.folder is None:
        return run
    words = shlex.join(("--env", f"{place.name}={place.folder}"))
    return replace(run, results=tuple(replace(case, command=f"{case.command} {words}") for case in run.results))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else ""
