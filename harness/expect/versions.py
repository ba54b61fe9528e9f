"""Which versions of torch and torchao something holds for, as specifiers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Version specifiers as for pip, such as ">=2.13,<2.14". Empty: it does not depend on that package."""

    torch: str = ""
    torchao: str = ""

    def gap(self, software: Mapping[str, str]) -> str | None:
        """The packages whose version is outside of the limits, as text; None when there is none.

        `software` maps package names to versions. A package that it lacks is not judged.
        """
        found = [
            f"{name} {software[name]} is installed, verified with {name}{limits}"
            for name, limits in (("torch", self.torch), ("torchao", self.torchao))
            if limits and name in software and not is_within(software[name], limits)
        ]
        return "; ".join(found) or None


def exactly(software: Mapping[str, str]) -> Verified:
    """A `Verified` for exactly these versions of torch and torchao, without pre-release and build tags."""
    found = {name: Version(software[name]).base_version for name in ("torch", "torchao") if name in software}
    return Verified(**{name: f"=={version}" for name, version in found.items()})


def is_within(version: str, limits: str) -> bool:
    """True when a version is within the limits. A source build "2.13.0a0+git12" counts as 2.13.0."""
    try:
        return SpecifierSet(limits).contains(Version(version).base_version)
    except InvalidVersion:
        return False
