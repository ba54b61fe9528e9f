"""What was verified: formulas with versions of torch and torchao, and levels of checks on classes of hardware.

A formula says what one version does. It is evaluated with every version; where it disagrees with one that nobody
verified, that version may have changed. Owns the record of versions with which formulas agreed with what ranks measured
(sealed JSON, in the package and in a project of one's own), and the evidence of one level on one class of hardware:
`golden/<class>/evidence-<level>.json`, beside the goldens of that class.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from packaging.version import Version

from harness.evidence.golden import EVIDENCE_OF_A_DEVICE, Provenance
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.expect.expectations import FORMULAS
from harness.hints import VERIFY_FORMULAS
from harness.result import Environment
from harness.sources import PACKAGES, evidence_key, read_version
from harness.text import changed_facts


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


Level = Literal["kernel", "proof", "native"]
LEVELS: tuple[Level, ...] = ("kernel", "proof", "native")
FLOAT8_FROM = (8, 9)  # compute capability with float8 matmuls
LEAST_DEVICES: Mapping[Level, int] = {"kernel": 1, "proof": 2, "native": 1}
# Changes of a number by more than this factor are reported; smaller ones come from other schedules and algorithms.
REPORTED_FROM = 2.0
_NAMED = 8  # of many items of one kind


class LevelItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that was tried: a check of a kernel, a case, a planted fault, a golden.

    `numbers` are finite, such as "error_of_sum"; `says` are the problems, or what a fault was detected by.
    """

    name: str
    verdict: str
    good: bool
    numbers: Mapping[str, float] = {}
    says: tuple[str, ...] = ()


class LevelReport(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one level found. `notes`: what was left out and why, and what makes its numbers less certain."""

    level: Level
    hardware: str  # class
    items: tuple[LevelItem, ...]
    notes: tuple[str, ...]
    environment: Environment
    devices: int  # of the run: CUDA devices, or ranks of a CPU
    memory: tuple[str, ...] = ()  # of each device, in words
    variables: Mapping[str, str] = {}  # of the environment of this process, that NCCL and cuBLAS read
    command: str
    created: str  # UTC, ISO 8601, seconds
    seconds: float

    @property
    def good(self) -> bool:
        """True if something was tried and everything is as it must be."""
        return bool(self.items) and all(item.good for item in self.items)

    @property
    def rehearsed(self) -> bool:
        """True for a rehearsal on a CPU, which proves the command and nothing about a GPU."""
        return self.environment.device == "cpu"


def provable_levels(capability: tuple[int, int], devices: int) -> tuple[Level, ...]:
    """The levels that so many GPUs of this compute capability can prove."""
    able = [level for level in LEVELS if level == "proof" or capability >= FLOAT8_FROM]
    return tuple(level for level in able if devices >= LEAST_DEVICES[level])


def level_path(root: Path, hardware: str, level: Level) -> Path:
    """The path of the evidence of a level; the summary for people is beside it, with the suffix .md."""
    return root / "golden" / hardware / f"{EVIDENCE_OF_A_DEVICE}{level}.json"


def read_level(root: Path, hardware: str, level: Level) -> LevelReport | None:
    """The stored evidence; None where there is none. Raises `Damaged`."""
    try:
        return read_sealed(level_path(root, hardware, level), LevelReport, remake="remove it and make it again.")
    except Missing:
        return None


def write_level(root: Path, report: LevelReport) -> Path:
    return write_sealed(level_path(root, report.hardware, report.level), report)


def list_levels(root: Path) -> tuple[tuple[str, Level], ...]:
    """The hardware class and the level of all stored evidence, sorted."""
    levels = [(path.parent.name, level) for level in LEVELS for path in root.glob(str(level_path(Path(), "*", level)))]
    return tuple(sorted(levels))


def changes(before: LevelReport, now: LevelReport) -> tuple[str, ...]:
    """What differs, each as a line: the environment, items that are new or gone, verdicts, numbers."""
    variables = sorted({*before.variables, *now.variables})
    old, new = ({item.name: item for item in report.items} for report in (before, now))
    return (
        *before.environment.differences(now.environment),
        *changed_facts(before.variables, now.variables, variables),
        *_counted("no longer tried", [name for name in old if name not in new]),
        *_counted("tried for the first time", [name for name in new if name not in old]),
        *(line for name in new if name in old for line in _changed_item(old[name], new[name])),
    )


def _counted(label: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{label}: {', '.join(names[:_NAMED])}{more}"


def _changed_item(before: LevelItem, now: LevelItem) -> Iterator[str]:
    if before.verdict != now.verdict:
        yield f"{now.name}: {before.verdict} -> {now.verdict}"
    for name in before.numbers.keys() & now.numbers.keys():
        old, new = before.numbers[name], now.numbers[name]
        if max(old, new) > REPORTED_FROM * min(old, new):
            yield f"{now.name}: {name} {old:.3g} -> {new:.3g}"
