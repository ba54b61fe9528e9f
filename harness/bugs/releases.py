"""Released versions of a package: from the package index as pip is configured, or from wheels in a folder."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.errors import HarnessError
from harness.running.environments import last_line
from harness.running.versions import Source

_LIST_S = 120.0


def versions_between(
    package: str, good: str, bad: str, source: Source, *, given: Collection[str] = ()
) -> tuple[str, ...]:
    """The released versions between `good` and `bad`, both included, oldest first. HarnessError for one not released.

    `given` are versions that need no release. Versions before a release count only where `good` or `bad` is one.
    """
    low, high = sorted(_version(text) for text in (good, bad))
    found = set(_in_folder(package, source.find_links) if source.find_links is not None else _in_index(package, source))
    found |= set(map(_version, given))
    for each in (low, high):
        if each not in found:
            known = ", ".join(map(str, sorted(found, reverse=True)[:8])) or "none"
            fix = f"the newest are {known}." if found else "check its name and the index."
            raise HarnessError(f"{package} {each} is not released there.", where=f"--package {package}", fix=fix)
    early = low.is_prerelease or high.is_prerelease
    between = (each for each in sorted(found) if low <= each <= high and (early or not each.is_prerelease))
    return tuple(str(each) for each in between if each in (low, high) or not _is_a_build(each, found))


def _is_a_build(version: Version, found: Collection[Version]) -> bool:
    """True for "2.13.0+cpu" where 2.13.0 is released too: one release is run once."""
    return version.local is not None and Version(version.public) in found


def _in_index(package: str, source: Source) -> Iterable[Version]:
    where = f"--package {package}"
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", *source.options, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"pip named no versions in {_LIST_S:.0f} s."
        raise HarnessError(what, where=where, fix="give another --index-url, or --find-links.") from error
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if found is None:
        what = f"pip names no versions: {last_line(done.stderr) or 'it says nothing'}."
        raise HarnessError(what, where=where, fix="check the name, or give --index-url or --find-links.")
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
