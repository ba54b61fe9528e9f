"""The versions of torch and torchao with which the formulas of `expect/` agreed with what ranks measured.

A formula says what one version does. It is evaluated with every version; where it disagrees with one that nobody
verified, that version may have changed. Owns the record of verified versions: sealed JSON, in the package and in a
project of one's own. Also says which levels of evidence some GPUs can prove.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from packaging.version import Version

from harness.evidence.golden import Provenance
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.expect.expectations import FORMULAS
from harness.hints import VERIFY_FORMULAS
from harness.sources import PACKAGES, evidence_key, read_version


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
    """Return the records of these projects, in order. Raises `Damaged`."""
    return tuple(entry for root in dict.fromkeys(roots) for entry in _read(formulas_path(root)))


def add_verified(root: Path, new: VerifiedWith) -> Path:
    """Store what was verified, instead of what was known of these versions, and return the path of the record."""
    path = formulas_path(root)
    others = [entry for entry in _read(path) if entry.versions != new.versions]
    in_order = sorted((*others, new), key=lambda entry: tuple(map(Version, entry.versions)))
    return write_sealed(path, FormulaEvidence(verified=tuple(in_order)))


def doubts(verified: Iterable[VerifiedWith], software: Mapping[str, str]) -> dict[str, str]:
    """Return the formulas that were not verified with these versions, each with a sentence about one that disagrees.

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
            installed = read_version(here[place])
            newer = installed is not None and installed > Version(known[-1])
            return (
                f"{name} {here[place]} differs from what holds {f'since {known[0]}' if newer else f'with {known[0]}'}"
            )
    return f"{_pair(here)} differs from what holds with each of them"


def _pair(versions: Iterable[str]) -> str:
    return " with ".join(f"{name} {version}" for name, version in zip(PACKAGES, versions, strict=True))


def _read(path: Path) -> tuple[VerifiedWith, ...]:
    try:
        return read_sealed(path, FormulaEvidence, remake=f"remove it and run `{VERIFY_FORMULAS}`.").verified
    except Missing:
        return ()


Level = Literal["kernel", "proof", "native"]
LEVELS: tuple[Level, ...] = ("kernel", "proof", "native")
FLOAT8_FROM = (8, 9)  # compute capability with float8 matmuls
LEAST_DEVICES: Mapping[Level, int] = {"kernel": 1, "proof": 2, "native": 1}


def provable_levels(capability: tuple[int, int], devices: int) -> tuple[Level, ...]:
    """Return the levels that so many GPUs of this compute capability can prove."""
    able = [level for level in LEVELS if level == "proof" or capability >= FLOAT8_FROM]
    return tuple(level for level in able if devices >= LEAST_DEVICES[level])
