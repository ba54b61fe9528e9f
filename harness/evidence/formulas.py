"""The versions of torch and torchao with which the formulas of `expect/` agreed with what ranks measured.

A formula says what one version does. It is evaluated with every version; where it disagrees with one that nobody
verified, that version may have changed. Owns the record of verified versions: sealed JSON, in the package and in a
project of one's own.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from packaging.version import Version

from harness.builds import PACKAGES, evidence_key, read_version
from harness.evidence.golden import Provenance
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.expect.expectations import FORMULAS
from harness.hints import VERIFY_FORMULAS


class VerifiedWith(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pair of versions. `cases`: in how many each formula was compared with clean runs and never disagreed."""

    torch: str  # the `evidence_key` of its version, as `torchao`
    torchao: str
    cases: dict[str, int]
    provenance: Provenance

    @property
    def versions(self) -> tuple[str, str]:
        return self.torch, self.torchao


class FormulaEvidence(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every pair of versions, sorted."""

    verified: tuple[VerifiedWith, ...]


def formulas_path(root: Path) -> Path:
    return root / "golden" / "evidence" / "formulas.json"


def read_verified(roots: Iterable[Path]) -> tuple[VerifiedWith, ...]:
    """What the records of these projects say, in order. Raises `Damaged`."""
    return tuple(entry for root in dict.fromkeys(roots) for entry in _read(formulas_path(root)))


def add_verified(root: Path, new: VerifiedWith) -> Path:
    """Store what was verified, in place of what was known of these versions, and return the path of the record."""
    path = formulas_path(root)
    others = [entry for entry in _read(path) if entry.versions != new.versions]
    in_order = sorted((*others, new), key=lambda entry: tuple(map(Version, entry.versions)))
    return write_sealed(path, FormulaEvidence(verified=tuple(in_order)))


def doubts(verified: Iterable[VerifiedWith], software: Mapping[str, str]) -> dict[str, str]:
    """The formulas that were not verified with these versions, each with a sentence about one that disagrees.

    `software` maps package names to versions. Nothing is doubted where one of the packages is not known.
    """
    if any(name not in software for name in PACKAGES):
        return {}
    here = tuple(evidence_key(software[name]) for name in PACKAGES)
    verified_pairs = {
        formula: [entry.versions for entry in verified if entry.cases.get(formula)] for formula in FORMULAS
    }
    return {formula: _differs(here, pairs) for formula, pairs in verified_pairs.items() if here not in pairs}


def _differs(here: tuple[str, ...], pairs: list[tuple[str, str]]) -> str:
    if not pairs:
        return f"{_pair(here)} differs from a formula that was verified with no version"
    for place, name in enumerate(PACKAGES):
        known = sorted({pair[place] for pair in pairs}, key=Version)
        if here[place] not in known:
            newer = _is_newer(here[place], known[-1])
            return (
                f"{name} {here[place]} differs from what holds {f'since {known[0]}' if newer else f'with {known[0]}'}"
            )
    return f"{_pair(here)} differs from what holds with each of them"


def _pair(versions: Iterable[str]) -> str:
    return " with ".join(f"{name} {version}" for name, version in zip(PACKAGES, versions, strict=True))


def _is_newer(version: str, other: str) -> bool:
    parsed = read_version(version)
    return parsed is not None and parsed > Version(other)


def _read(path: Path) -> tuple[VerifiedWith, ...]:
    try:
        return read_sealed(path, FormulaEvidence, remake=f"remove it and run `{VERIFY_FORMULAS}`.").verified
    except Missing:
        return ()
