"""Other Python environments that run the same cases: one with another version of a package, or one that a user made.

Both are made in the state folder: what they have of their own comes first, then this harness, then every other package
of the environment that runs. So they cost little, and need not have the harness installed.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from harness.document import RunDocument
from harness.errors import HarnessError
from harness.jsonform import from_json
from harness.running.stored import read_document

_HARNESS = Path(__file__).parents[2]  # what the environments run is the harness that runs
_INSTALL_S = 1800.0
_PACKAGES = ("torch", "torchao", "torchtitan", "numpy")  # come from the environment of the user if it has them


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where versions come from: the index of pip, another one, or a folder of wheels."""

    index_url: str | None = None
    find_links: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options of pip and uv."""
        index = () if self.index_url is None else ("--index-url", self.index_url)
        links = () if self.find_links is None else ("--no-index", "--find-links", str(self.find_links))
        return (*index, *links)


class NotInstalled(Exception):
    """A version that cannot be installed; the text says why."""


class NamedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment under the name of its runs."""

    name: str
    python: Path


def python_with(package: str, version: str, source: Source, folder: Path) -> Path:
    """The Python of an environment with this version, made in `folder` where it is not there.

    Raises NotInstalled, or TimeoutExpired.
    """
    home = folder / f"{canonicalize_name(package)}-{version}"
    python, done = home / "bin" / "python", home / ".ready"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=False, symlinks=True)
        _install(package, version, source, python)
        done.touch()
    _add_paths(home, [str(_HARNESS), *site.getsitepackages()])  # another checkout may have made it
    return python


def python_over(path: Path, folder: Path) -> Path:
    """The Python of an environment that has what the virtual environment at `path` has, and the harness.

    Raises HarnessError where `path` is none, is of another Python, or hides a package behind a hook of its own.
    """
    where, packages = f"--env {path}", _site_packages(path)
    lines = [f"import site; site.addsitedir({str(packages)!r})", str(_HARNESS), *site.getsitepackages()]
    home = folder / f"over-{sha256(repr(lines).encode()).hexdigest()[:16]}"
    if not (home / ".ready").exists():
        venv.create(home, with_pip=False, symlinks=True, clear=True)
        _add_paths(home, lines)
        (home / ".ready").touch()
    theirs, ours = _origins(path / "bin" / "python"), _origins(home / "bin" / "python")
    for name, origin in theirs.items():
        if origin and ours[name] != origin:
            what = f"{name} would be imported from {ours[name]}, not from {origin}."
            fix = f"install {name} there without -e, or --config-settings editable_mode=compat."
            raise HarnessError(what, where=where, fix=fix)
    return home / "bin" / "python"


def run_in_environment(place: NamedEnvironment, words: Sequence[str], folder: Path) -> RunDocument:
    """The results of `run` with these words in another environment, stored under its name.

    What it says goes to where this process says it. Raises HarnessError where it ran nothing.
    """
    file = folder / f"{place.name}.json"
    file.unlink(missing_ok=True)
    command = [str(place.python), "-m", "harness", "run", *words, "--name", place.name, "--json", str(file)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the run got it too, and ends by itself
            code = process.wait()
    if not file.exists():
        raise HarnessError(f"the run there ended with {code}.", where=place.name, fix="see what it says above.")
    return read_document(file)


def _add_paths(home: Path, lines: Sequence[str]) -> None:
    """Write what else the environment at `home` imports from, in this order, after its own packages."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (packages / "of_the_harness.pth").write_text("".join(f"{line}\n" for line in lines))


def _site_packages(path: Path) -> Path:
    """The folder of the packages of a virtual environment of this version of Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = path.resolve() / "lib" / version / "site-packages"
    if not (path / "pyvenv.cfg").is_file():
        fix = "name a folder that `python -m venv` made."
        raise HarnessError("this is no virtual environment.", where=f"--env {path}", fix=fix)
    if not packages.is_dir():
        raise HarnessError(
            f"it has no packages of {version}, with which this harness runs.",
            where=f"--env {path}",
            fix=f"make it with {version}, or run there with --name, and gate what both stored.",
        )
    return packages


def _origins(python: Path) -> dict[str, str]:
    """The file that each package would be imported from, without importing it; empty where there is none."""
    code = (
        "import importlib.util, json, sys; found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}; "
        "print(json.dumps({name: spec.origin or '' if spec else '' for name, spec in found.items()}))"
    )
    command = [str(python), "-I", "-c", code, *_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        what = f"its Python does not start: {last_line(done.stderr)}."
        raise HarnessError(what, where=str(python), fix="make the environment again.")
    return from_json(done.stdout.encode(), dict[str, str])


def _install(package: str, version: str, source: Source, python: Path) -> None:
    wanted = f"{package}=={version}"
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--python", str(python), "--no-deps", *source.options, wanted]
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        command = [*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", *source.options, wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode != 0:
        raise NotInstalled(last_line(done.stderr) or f"{Path(command[0]).name} ended with {done.returncode}")


def last_line(text: str) -> str:
    """The last line of an error that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else ""
