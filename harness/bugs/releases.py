"""Released versions of a package: which there are, and an environment for each.

Versions come from the package index as pip is configured, or from wheels in a folder. An environment has one version of
one package and sees every other package of the environment that runs, so it costs one download.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.errors import HarnessError

_HARNESS = Path(__file__).parents[2]  # what the environments run is the harness that runs
_INSTALL_S = 1800.0
_LIST_S = 120.0


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


def versions_between(package: str, good: str, bad: str, source: Source) -> tuple[str, ...]:
    """The released versions between `good` and `bad`, both included, oldest first. HarnessError for one not released.

    Versions before a release count only where `good` or `bad` is one.
    """
    low, high = sorted(_version(text) for text in (good, bad))
    found = set(_in_folder(package, source.find_links) if source.find_links is not None else _in_index(package, source))
    for each in (low, high):
        if each not in found:
            known = ", ".join(map(str, sorted(found, reverse=True)[:8])) or "none"
            fix = f"the newest are {known}." if found else "check its name and the index."
            raise HarnessError(f"{package} {each} is not released there.", where=f"--package {package}", fix=fix)
    early = low.is_prerelease or high.is_prerelease
    return tuple(str(each) for each in sorted(found) if low <= each <= high and (early or not each.is_prerelease))


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
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        lines = [str(_HARNESS), *site.getsitepackages()]
        (packages / "of_the_harness.pth").write_text("".join(f"{line}\n" for line in lines))
        done.touch()
    return python


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
        raise NotInstalled(_last(done.stderr) or f"{Path(command[0]).name} ended with {done.returncode}")


def _in_index(package: str, source: Source) -> Iterable[Version]:
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", *source.options, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"pip named no versions in {_LIST_S:.0f} s."
        raise HarnessError(
            what, where=f"--package {package}", fix="give another --index-url, or --find-links."
        ) from error
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if found is None:
        what = f"pip names no versions: {_last(done.stderr) or 'it says nothing'}."
        raise HarnessError(
            what, where=f"--package {package}", fix="check the name, or give --index-url or --find-links."
        )
    return [_version(text) for text in found[1].split(", ")]


def _in_folder(package: str, folder: Path) -> Iterable[Version]:
    wheels = folder.glob("*.whl") if folder.is_dir() else ()
    for wheel in wheels:
        with contextlib.suppress(InvalidWheelFilename):
            name, version, *_ = parse_wheel_filename(wheel.name)
            if name == canonicalize_name(package):
                yield version


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise HarnessError(f"'{text}' is no version.", fix="write it as pip does: 0.14.1.") from error


def _last(text: str) -> str:
    """The last line of an error that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else ""
