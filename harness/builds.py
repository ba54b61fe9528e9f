"""Builds of a package: how the version of a nightly, of a commit and of a release are compared.

The order is that of PEP 440: 2.15.0.dev20260801 < 2.15.0a0 < 2.15.0rc1 < 2.15.0. So a nightly is older than the release
whose number it has, and no two nightlies are the same.
"""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

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
    """The unreleased builds among these, which no later build can be held against: "torch 2.16.0.dev20261120"."""
    return " and ".join(f"{name} {software[name]}" for name in PACKAGES if is_unreleased(software.get(name, "")))


def evidence_key(version: str) -> str:
    """The builds that evidence from this one holds for: of a release all its builds, else exactly this one.

    "2.13.0" of "2.13.0+cpu" and "2.13.0+cu130", whose sources are the same. What is no version stays as it is.
    """
    parsed = read_version(version)
    return version if parsed is None or is_unreleased(version) else parsed.public


def holds_for(installed: Mapping[str, str], made_with: Mapping[str, str]) -> bool:
    """False where evidence was made with an unreleased build of a package, and another one is installed."""
    made = {name: made_with[name] for name in PACKAGES if is_unreleased(made_with.get(name, ""))}
    return all(installed.get(name) == version for name, version in made.items())


def is_since(version: str, release: str) -> bool:
    """True from this release on: for "2.15.1+cpu" and "2.16.0.dev20261120" since 2.15, not for "2.15.0rc1"."""
    parsed = read_version(version)
    return parsed is not None and parsed >= Version(release)


def is_among(version: str, limits: str) -> bool | None:
    """True for a version within these limits, such as ">=2.13,<2.14"; None for a pre-release that may be or not.

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
    """A number above every release before that of `version`, and below it."""
    numbers = list(version.release)
    while numbers[-1] == 0 and len(numbers) > 1:
        numbers.pop()
    return ".".join(map(str, (*numbers[:-1], max(numbers[-1] - 1, 0), _BEYOND if any(numbers) else 0)))
