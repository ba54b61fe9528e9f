"""Environments with other versions of one package: the one that runs, one that a user has, or one that is made.

One that is made has this version of its own; then come this harness and every other package of the environment that
runs. torch is installed with all of its libraries, which are of one version with it, so such an environment is whole.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.durable import take_lock
from harness.errors import HarnessError
from harness.plural import binary_bytes
from harness.running.environments import (
    HARNESS,
    NamedEnvironment,
    add_paths,
    installed_in,
    last_line,
    python_over,
    site_line,
)
from harness.sources import installed_version

_INSTALL_S = 1800.0
_POLL_S = 1.0
_LIBRARIES = re.compile(r"torch|triton|pytorch-triton|(nvidia|cuda|intel)-.*")  # which are not held at their versions
_PROGRESS = re.compile(r"(Downloading|Installing collected|Prepared|Installed) .*")  # lines of pip and uv

Note = Callable[[str], None]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where versions come from: the index of pip, another one, or a folder of wheels."""

    index_url: str | None = None
    find_links: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        index = () if self.index_url is None else ("--index-url", self.index_url)
        links = () if self.find_links is None else ("--no-index", "--find-links", str(self.find_links))
        return (*index, *links)


class NotInstalled(Exception):
    """A version that cannot be installed; the text says why."""


class Versions(msgspec.Struct, frozen=True):
    """The environments of the versions of one package."""

    package: str
    folder: Path  # of those that are made
    source: Source = Source()
    given: Mapping[str, Path] = {}  # virtual environments of a user by version, or by any other name
    note: Note = lambda text: None

    def environment(self, version: str) -> NamedEnvironment:
        """The environment with this version, made and kept where there is none.

        Raises NotInstalled, TimeoutExpired, or HarnessError where the environment of a user has another version.
        """
        name, path = f"{self.package}-{version}", self.given.get(version)
        if path is not None:
            return NamedEnvironment(name=name, python=self._python_of_user(version, path), folder=path)
        if is_release(installed_version(self.package) or "", version):
            return NamedEnvironment(name=name, python=Path(sys.executable))
        home = self._home(version)
        with _alone(home):
            if not (home / ".ready").exists():
                self._make(home, version)
            # Again, because another checkout may have made it.
            add_paths(home, [str(HARNESS), *map(site_line, site.getsitepackages())])
        return NamedEnvironment(name=name, python=home / "bin" / "python", folder=home)

    def _home(self, version: str) -> Path:
        """The folder of the environment: one of its own, unless a kept one has a build of this version."""
        own = self.folder / f"{canonicalize_name(self.package)}-{version}"
        name = own.name.partition("+")[0]
        others = (self.folder / name, *sorted(self.folder.glob(f"{name}+*")))
        kept = (home for home in others if (home / ".ready").exists() and not (own / ".ready").exists())
        return next((home for home in kept if self._has(home, version)), own)

    def _has(self, home: Path, version: str) -> bool:
        return is_release(installed_in(home / "bin" / "python", self.package), version)

    def _python_of_user(self, version: str, path: Path) -> Path:
        python = python_over(path, self.folder)
        installed = installed_in(python, self.package)
        if not installed or (is_version(version) and not is_release(installed, version)):
            what = f"it has {self.package} {installed}, not {version}." if installed else f"it has no {self.package}."
            raise HarnessError(what, where=f"--env {version}={path}", fix="give one that has this version.")
        return python

    def _make(self, home: Path, version: str) -> None:
        name = f"{self.package} {version}"
        self.note(f"{name}: installing it into {home}, which is kept")
        started = time.monotonic()
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=False, symlinks=True)
        try:
            _run(_install_command(self.package, version, self.source, home), home, lambda line: self.note(f"  {line}"))
        except (NotInstalled, subprocess.TimeoutExpired):
            shutil.rmtree(home, ignore_errors=True)
            raise
        (home / ".ready").touch()
        size = sum(path.lstat().st_size for path in home.rglob("*") if path.is_file())
        self.note(f"{name}: {binary_bytes(size)} in {time.monotonic() - started:.0f} s")


def is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def is_release(installed: str, version: str) -> bool:
    """True where this is the version that is installed: "2.13.0" stands for "2.13.0+cpu", not for "2.13.0+git12"."""
    if not is_version(installed) or not is_version(version):
        return False
    here, asked = Version(installed), Version(version)
    return here == asked or (Version(here.public) == asked and not (here.local or "").startswith("git"))


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Waits for other processes that make the same environment."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as file:
        take_lock(file, wait=True)
        yield


def _install_command(package: str, version: str, source: Source, home: Path) -> Sequence[str]:
    """What installs a version there. The libraries of torch come along, everything else as it is here."""
    python, wanted = str(home / "bin" / "python"), f"{package}=={version}"
    others: tuple[str, ...] = ("--no-deps",)
    if package == "torch":  # its libraries change with every version
        (home / "constraints.txt").write_text("".join(f"{line}\n" for line in _held()))
        others = ("--constraint", str(home / "constraints.txt"))
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", python, *others, *source.options, wanted]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--progress-bar", "off"]
    return [*pip, *others, "--only-binary", ":all:", *source.options, wanted]


def _held() -> list[str]:
    """Every package of the environment that runs with its version, without torch and the libraries of torch."""
    versions = {canonicalize_name(package.name): package.version for package in distributions() if package.name}
    return sorted(f"{name}=={version}" for name, version in versions.items() if not _LIBRARIES.fullmatch(name))


def _run(command: Sequence[str], home: Path, note: Note) -> None:
    """Run pip or uv, and tell its progress. Raises NotInstalled, or TimeoutExpired."""
    path = home / "install.log"
    deadline = time.monotonic() + _INSTALL_S
    with path.open("w") as out, path.open() as log, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            while True:
                ended = process.poll() is not None
                for line in map(str.strip, log):  # what was added since the last time
                    if _PROGRESS.match(line):
                        note(line)
                if ended:
                    break
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, _INSTALL_S)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise NotInstalled(last_line(path.read_text()) or f"{Path(command[0]).name} ended with {process.returncode}")
