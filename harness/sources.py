"""Installed packages: their files, found without importing them, digests over these, and how their versions compare.

The order of versions is that of PEP 440: 2.15.0.dev20260801 < 2.15.0a0 < 2.15.0rc1 < 2.15.0. So a nightly is older than
the release whose number it has, and no two nightlies are the same.
"""

import base64
import contextlib
import csv
import hashlib
import importlib.util
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

_CODE = re.compile(r"\.py$|\.so(\.[0-9.]+)?$")
_LISTED = re.compile(r"\.py\b|\.so\b")  # matches every line of a RECORD about such a file


# Everything that the numbers of a run depend on, by the name of its distribution: the module that is imported.
MODULES = {name: name for name in ("torch", "torchao", "torchtitan", "numpy", "triton")} | {"fp8-harness": "harness"}


def software() -> dict[str, str]:
    """Versions of Python and of what numbers depend on, and digests of their sources: "torch", "torch sources", …

    Equal on two machines where these packages are the same. Takes about a second: torch has 2500 files of Python.
    """
    facts = {"python": platform.python_version()}
    for name, module in MODULES.items():
        if (installed := installed_version(name)) is not None:
            facts[name] = installed
        if (source := installed_source(module)) is not None:
            facts[f"{name} sources"] = source.digest[:16]
    return facts


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_editable(distribution: Distribution) -> bool:
    """Return True if pip installed it from a folder whose files may change under the same version."""
    direct = distribution.read_text("direct_url.json")
    try:
        return direct is not None and bool(json.loads(direct).get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    versions = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in versions.items() if version is not None}


class InstalledSource(NamedTuple):
    """Where a package is, and what its Python files are: equal digests are equal sources, on any machine."""

    folder: Path
    digest: str


def installed_source(package: str) -> InstalledSource | None:
    """Return the source of an installed package, without importing it, or None. Reads every Python file."""
    paths = package_paths(package)
    if not paths:
        return None
    return InstalledSource(paths[0], source_digest(paths[0], paths[0].rglob("*.py")))


def files_digest(package: str, folders: Sequence[str] = ()) -> str:
    """Over path and content of the code files of an installed package, equal on any machine; empty when there is none.

    What an installer wrote in RECORD and nobody touched since counts by the hash there, the rest is read. Only a shared
    library that no RECORD lists, a build of one's own, counts by size and time of change: torch's have 2 GB.
    """
    files = [
        (path[len(str(place)) :], _content(path, status, recorded))
        for place in package_paths(package, folders)
        for recorded in (_recorded(place),)
        for path, status in _code_files(str(place))
    ]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest() if files else ""


class _Recorded(NamedTuple):
    """What a RECORD says about a file, and when it was written: after all files of its package."""

    digest: str  # "sha256=" and base64
    size: str
    at_ns: int


def _recorded(place: Path) -> dict[str, _Recorded]:
    """By full path, the files of a package, or of a module, that installers have recorded with their hash."""
    recorded = {}
    folder, name = str(place.parent), place.name
    for record in place.parent.glob("*.dist-info/RECORD"):
        written_ns, content = record.stat().st_mtime_ns, record.read_bytes()
        if b"\n" + name.encode() not in b"\n" + content:  # as of most packages, with thousands of lines each
            continue
        lines = (line for line in content.decode().splitlines() if line.startswith(name) and _LISTED.search(line))
        for path, digest, size in csv.reader(lines):
            if digest:
                recorded[f"{folder}/{path}"] = _Recorded(digest, size, written_ns)
    return recorded


def _content(path: str, status: os.stat_result, recorded: Mapping[str, _Recorded]) -> str:
    """Return the hash of a file as a RECORD writes it."""
    known = recorded.get(path)
    if known is not None and (str(status.st_size), True) == (known.size, status.st_mtime_ns <= known.at_ns):
        return known.digest
    if known is None and not path.endswith(".py"):
        return f"{status.st_size} {status.st_mtime_ns}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return ""
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _code_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every Python file and shared library at or below `folder`. Links to folders are not entered.

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


def package_paths(name: str, folders: Sequence[str] = ()) -> list[Path]:
    """Return the folders of a top-level package, or the file of a top-level module, without importing it, or nothing.

    Looked for in `folders` too.
    """
    spec = top_level_spec(name, folders)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder).resolve() for folder in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.has_location and spec.origin is not None else []


def module_files(name: str, folders: Sequence[str] = ()) -> list[Path]:
    """Return the files of the package that a module is in, or its single file; none where there is no such module.

    Looked for in `folders` too.
    """
    names = name.split(".")
    top = spec = top_level_spec(names[0], folders)
    for at in range(1, len(names)):
        if spec is None or spec.submodule_search_locations is None:
            return []
        spec = PathFinder.find_spec(".".join(names[: at + 1]), list(spec.submodule_search_locations))
    if spec is None or top is None:
        return []
    if top.submodule_search_locations is None:
        return [Path(top.origin)] if top.origin else []
    return sorted(path for folder in top.submodule_search_locations for path in Path(folder).rglob("*.py"))


def module_digest(name: str, folders: Sequence[str] = ()) -> str:
    """Return a digest of the package that a module is in, equal on any machine; empty if there is no such module."""
    files = module_files(name, folders)
    return source_digest(common_folder(files), files)[:16] if files else ""


def common_folder(files: Iterable[Path]) -> Path:
    """Return the folder that all files are below: of a package without `__init__.py`, that of no file."""
    return Path(os.path.commonpath([path.parent for path in files]))


PACKAGES = ("torch", "torchao")  # which evidence is of
_BEYOND = 10**9  # above every number in a version


def read_version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def is_unreleased(version: str) -> bool:
    """True for a nightly, a release candidate and a build of a commit, such as "2.15.0a0+git12" or "2.13.0+git12"."""
    parsed = read_version(version)
    return parsed is not None and (parsed.is_prerelease or (parsed.local or "").startswith("git"))


def unreleased_of(software: Mapping[str, str]) -> str:
    """Return the unreleased builds among these, which later builds cannot confirm: "torch 2.16.0.dev20261120"."""
    return " and ".join(f"{name} {software[name]}" for name in PACKAGES if is_unreleased(software.get(name, "")))


def evidence_key(version: str) -> str:
    """Return the builds that evidence from this one holds for: of a release all its builds, else exactly this one.

    "2.13.0" of "2.13.0+cpu" and "2.13.0+cu130", whose sources are the same. What is no version stays as it is.
    """
    parsed = read_version(version)
    return version if parsed is None or is_unreleased(version) else parsed.public


def holds_for(installed: Mapping[str, str], made_with: Mapping[str, str]) -> bool:
    """Return False if evidence was made with an unreleased build of a package, and another one is installed."""
    made = {name: made_with[name] for name in PACKAGES if is_unreleased(made_with.get(name, ""))}
    return all(installed.get(name) == version for name, version in made.items())


def is_since(version: str, release: str) -> bool:
    """Return True for this release and later: "2.15.1+cpu" and "2.16.0.dev20261120" since 2.15, not "2.15.0rc1"."""
    parsed = read_version(version)
    return parsed is not None and parsed >= Version(release)


def is_among(version: str, limits: str) -> bool | None:
    """Return True for a version within these limits, such as ">=2.13,<2.14"; None for a pre-release that may be or not.

    A pre-release lies between the last release before it and its own: where both are within the limits, it is; where
    neither is, it is not; else its date decides. Limits that tell it, such as ">=2.16.0.dev20261110", are taken as they
    are. A local build, such as "2.13.0+cu130" or "2.13.0+git12", counts as its release unless the limits name one. What
    is no version is within no limits.
    """
    parsed, specifiers = read_version(version), SpecifierSet(limits)
    if parsed is None or not limits:
        return not limits
    told = any(Version(specifier.version.removesuffix(".*")).is_prerelease for specifier in specifiers)
    if told or not parsed.is_prerelease:
        return specifiers.contains(parsed, prereleases=True)
    before, own = specifiers.contains(_last_before(parsed)), specifiers.contains(parsed.base_version)
    return own if before == own else None


def _last_before(version: Version) -> str:
    """Return a number above every release before that of `version`, and below it."""
    numbers = list(version.release)
    while numbers[-1] == 0 and len(numbers) > 1:
        numbers.pop()
    return ".".join(map(str, (*numbers[:-1], max(numbers[-1] - 1, 0), _BEYOND if any(numbers) else 0)))
