"""Other Python environments that run the same cases: virtual environments of a user, as they are.

What they have comes first, then every other package of the environment that runs; the harness is always the one that
runs. So they need not have it installed.
"""

from __future__ import annotations

import os
import shlex
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.jsonform import from_json
from harness.result import RunResult
from harness.running.stored import read_results

HARNESS = Path(__file__).parents[2]  # what the environments run is the harness that runs
_PACKAGES = ("torch", "torchao", "torchtitan", "numpy")  # come from the environment of the user if it has them


class NamedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment under the name of its runs. `folder`: the one given by `run --env`; None for this environment."""

    name: str
    python: Path
    folder: Path | None = None
    cwd: Path | None = None  # None: this one
    root: Path | None = None  # of the project; None: what the words say
    python_path: tuple[str, ...] | None = None  # None: the PYTHONPATH of this process


def python_over(path: Path, folder: Path) -> Path:
    """The Python of an environment that has what the virtual environment at `path` has, and the harness.

    Raises HarnessError where `path` is none, is of another Python, or hides a package behind a hook of its own.
    """
    where, packages = f"--env {path}", _site_packages(path)
    checkout = [str(HARNESS)] if (HARNESS / "pyproject.toml").is_file() else []  # has no package that hides theirs
    lines = [*checkout, site_line(str(packages)), str(HARNESS), *map(site_line, site.getsitepackages())]
    python = python_with(lines, folder)
    names = (*_PACKAGES, "harness")
    theirs, ours = origins(path.resolve() / "bin" / "python", names), origins(python, names)
    if ours.pop("harness") != str(HARNESS / "harness" / "__init__.py"):
        fix = "uninstall it there: the harness that runs is used."
        raise HarnessError("it has a harness of its own.", where=where, fix=fix)
    for name, origin in theirs.items():
        if origin and ours.get(name, origin) != origin:
            what = f"{name} would be imported from {ours[name]}, not from {origin}."
            fix = f"install {name} there without -e, or --config-settings editable_mode=compat."
            raise HarnessError(what, where=where, fix=fix)
    return python


def python_with(lines: Sequence[str], folder: Path) -> Path:
    """The Python of an environment with nothing of its own that imports from these, in this order."""
    home = folder / f"over-{sha256(repr(lines).encode()).hexdigest()[:16]}"
    if not (home / ".ready").exists():
        venv.create(home, with_pip=False, symlinks=True, clear=True)
        add_paths(home, lines)
        (home / ".ready").touch()
    return home / "bin" / "python"


def site_line(folder: str) -> str:
    """The line of a path file that adds a folder of packages with what is installed there by `pip install -e`."""
    return f"import site; site.addsitedir({folder!r})"


def run_in_environment(
    place: NamedEnvironment, words: Sequence[str], folder: Path, *, reports: bool = True
) -> RunResult:
    """The results of `run` with these words in another environment, stored under its name.

    What it says goes to where this process says it; without `reports` it is silent. Raises HarnessError where it ran
    nothing.
    """
    file = (folder / f"{place.name}.jsonl").resolve()
    file.unlink(missing_ok=True)
    root = () if place.root is None else ("--root", str(place.root))
    asked = (*words, *root, "--name", place.name, "--json", str(file))
    command = [str(place.python), "-P", "-m", "harness", "run", *asked]
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
        what = f"the run there ended with {code}{': ' * bool(last)}{last}"
        fix = "look for what this environment lacks." if last else "see what it says above."
        raise HarnessError(f"{what.removesuffix('.')}.", where=place.name, fix=fix)
    run = read_results(file)
    if place.folder is None:
        return run
    words = shlex.join(("--env", f"{place.name}={place.folder}"))
    return replace(run, results=tuple(replace(case, command=f"{case.command} {words}") for case in run.results))


def add_paths(home: Path, lines: Sequence[str]) -> None:
    """Write what else the environment at `home` imports from, in this order, after its own packages."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (packages / "of_the_harness.pth").write_text("".join(f"{line}\n" for line in lines))


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
            fix=f"make it with {version}, or run there with --name, and gate what both stored.",
        )
    return packages


def origins(python: Path, names: Sequence[str]) -> dict[str, str]:
    """The file that each package would be imported from, without importing it; empty where there is none."""
    code = (
        "import importlib.util, json, sys; found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}; "
        "print(json.dumps({name: spec.origin or '' if spec else '' for name, spec in found.items()}))"
    )
    return from_json(_said_by(python, code, names), dict[str, str])


def installed_in(python: Path, package: str) -> str:
    """The version of a package that this Python would import; empty where it has none. Raises HarnessError."""
    code = (
        "import json, sys; from importlib import metadata\n"
        "try: print(json.dumps(metadata.version(sys.argv[1])))\n"
        "except metadata.PackageNotFoundError: print(json.dumps(''))"
    )
    return from_json(_said_by(python, code, (package,)), str)


def _said_by(python: Path, code: str, words: Sequence[str]) -> bytes:
    """What the code prints there. Raises HarnessError where it fails."""
    done = subprocess.run([str(python), "-I", "-c", code, *words], capture_output=True, check=False, timeout=60)
    if done.returncode != 0:
        what = f"its Python does not start: {last_line(done.stderr.decode(errors='replace'))}."
        raise HarnessError(what, where=str(python), fix="make the environment again.")
    return done.stdout


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else ""
