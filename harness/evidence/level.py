"""The evidence of one level on one class of hardware: what was tried, with what result, on which devices.

Sealed JSON, `golden/<class>/evidence-<level>.json`, beside the goldens of that class. Also says what changed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from harness.environment import Environment, changed_facts
from harness.evidence.golden import EVIDENCE_OF_A_DEVICE
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed

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
