"""The evidence of `dev evidence`: what was tried, with what result, on which devices, and what people read of it.

A level on one class of hardware is sealed JSON, `golden/<class>/evidence-<level>.json`, beside the goldens of that
class; its summary for people is beside it, with the suffix .md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.evidence.golden import EVIDENCE_OF_A_DEVICE
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.evidence.verified import LEVELS, Level
from harness.report.sections import Facts, Items, Section
from harness.result import Environment
from harness.text import changed_facts, counted
from harness.trace.record import Record

# Changes of a number by more than this factor are reported; smaller ones come from other schedules and algorithms.
REPORTED_FROM = 2.0
_NAMED = 8  # of many items of one kind
_SHOWS: dict[Level, str] = {
    "kernel": "The float8 matmul of the device, beside the exact one",
    "proof": "The exact matmul with the collectives, sharding and compiler of the device",
    "native": "The kernels and collectives of the device in bfloat16",
}
_MOST_CHANGES = 40


class DeviceFacts(Record, frozen=True, kw_only=True):
    """One CUDA device. `free_bytes` is what no process holds."""

    index: int
    name: str
    capability: tuple[int, int]  # (9, 0)
    total_bytes: int
    free_bytes: int


class TorchFacts(Record, frozen=True, kw_only=True):
    """The build of torch and its devices. `cuda` and `nccl` are versions; empty if torch was built without."""

    torch: str
    cuda: str = ""
    nccl: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    error: str = ""  # why torch shows no devices, in its own words


class LevelItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that was tried: a check of a kernel, a case, an injected fault, a golden.

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
        """Return True if something was tried and everything is as it must be."""
        return bool(self.items) and all(item.good for item in self.items)

    @property
    def rehearsed(self) -> bool:
        """Return True for a rehearsal on a CPU, which proves the command and nothing about a GPU."""
        return self.environment.device == "cpu"


def level_path(root: Path, hardware: str, level: Level) -> Path:
    """Return the path of the evidence of a level; the summary for people is beside it, with the suffix .md."""
    return root / "golden" / hardware / f"{EVIDENCE_OF_A_DEVICE}{level}.json"


def read_level(root: Path, hardware: str, level: Level) -> LevelReport | None:
    """Return the stored evidence, or None. Raises `Damaged`."""
    try:
        return read_sealed(level_path(root, hardware, level), LevelReport, remake="remove it and make it again.")
    except Missing:
        return None


def write_level(root: Path, report: LevelReport) -> Path:
    return write_sealed(level_path(root, report.hardware, report.level), report)


def list_levels(root: Path) -> tuple[tuple[str, Level], ...]:
    """Return the hardware class and the level of all stored evidence, sorted."""
    levels = [(path.parent.name, level) for level in LEVELS for path in root.glob(str(level_path(Path(), "*", level)))]
    return tuple(sorted(levels))


def changes(before: LevelReport, now: LevelReport) -> tuple[str, ...]:
    """Return what differs, each as a line: the environment, items that are new or gone, verdicts, numbers."""
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


def level_line(report: LevelReport) -> str:
    """Level, class, whether all is good, how many of what."""
    verdicts = Counter(item.verdict for item in report.items)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    kind = "rehearsal of " if report.rehearsed else ""
    result = "good" if report.good else "NOT GOOD"
    return f"{kind}{report.level} on {report.hardware}: {result}; {counts}; {report.seconds:g} s"


def level_section(report: LevelReport, changed: Sequence[str] | None) -> Section:
    """Return the summary. `changed` since the evidence that it replaces; None if there was none."""
    rehearsed = "**A rehearsal on a CPU.** It shows that the command works, and nothing about a GPU."
    bad = [item for item in report.items if not item.good]
    wrong = tuple(f"{item.name}: {item.verdict}{''.join(f'; {line}' for line in item.says[:2])}" for item in bad)
    shown = tuple((changed or ["nothing"])[:_MOST_CHANGES])
    if changed and len(changed) > _MOST_CHANGES:
        shown += (f"and {len(changed) - _MOST_CHANGES} more",)
    return Section(
        title=_SHOWS[report.level],
        blocks=(
            *([rehearsed] if report.rehearsed else []),
            f"{level_line(report)}.",
            Section(title=counted(len(bad), "problem"), blocks=(Items(wrong),)),
            Section(title="Largest numbers", blocks=(Items(tuple(_largest(report.items))),)),
            Section(title="Left out, and doubts", blocks=(Items(report.notes),)),
            Section(title="Changed", blocks=() if changed is None else (Items(shown),)),
            Section(title="Made by", blocks=(Facts(tuple(_origin(report))),)),
        ),
    )


def _largest(items: Sequence[LevelItem]) -> Iterator[str]:
    for name in dict.fromkeys(name for item in items for name in item.numbers if name != "allowed"):
        item = max((item for item in items if name in item.numbers), key=lambda item: item.numbers[name])
        allowed = f" of {item.numbers['allowed']:.3g}" if "allowed" in item.numbers else ""
        yield f"{name}: {item.numbers[name]:.3g}{allowed}, {item.name}"


def _origin(report: LevelReport) -> Iterator[tuple[str, str]]:
    here = report.environment
    yield "command", f"`{report.command}`"
    yield "created", report.created
    yield "devices", "; ".join(report.memory) or f"{counted(report.devices, 'rank')} of {here.cpu or 'a CPU'}"
    yield "driver", here.driver
    yield "packages", ", ".join(f"{name} {version}" for name, version in here.packages.items())
    yield "commit", here.commit
    yield "variables", ", ".join(f"{name}={value}" for name, value in report.variables.items())
