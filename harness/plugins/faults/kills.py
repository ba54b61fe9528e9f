"""Which rules found which injected fault: the proof that checks have teeth, as `dev mutate --record` measured it.

Sealed JSON in the package and in a project of one's own. `explain --list faults` prints it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.checks.catalogue import RULES
from harness.errors import HarnessError
from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.matrix.axes import suggestion
from harness.plugins.faults.faults import FAULT_CLASSES, MISLEADING, FaultClass, all_faults
from harness.project import Project
from harness.report.sections import Block, Section, Table
from harness.text import counted
from harness.verdict import Verdict, check_of

_CHECKS = tuple(dict.fromkeys(map(check_of, RULES)))  # and what finds ranks that ended


class Kill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a case ended in which a fault was injected. `rules`: those that the clean case does not break, sorted.

    `misnamed`: what the first finding names otherwise or not at all, of what the fault and its class demand; None if
    there is no finding.
    """

    verdict: Verdict
    rules: tuple[str, ...]
    misnamed: tuple[str, ...] | None = None


def scores(headlines: Iterable[tuple[FaultClass, Iterable[str]]]) -> dict[FaultClass, Counter[str]]:
    """Return for every class how many headlines there are, are right about place and cause, and mislead.

    `headlines`: the class of each, and what it misnames.
    """
    counts: dict[FaultClass, Counter[str]] = {group: Counter() for group in FAULT_CLASSES}
    for group, misnamed in headlines:
        wrong = set(misnamed)
        counts[group]["headlines"] += 1
        counts[group]["place"] += not wrong & {"module", "operand", "rank", "step"}
        counts[group]["cause"] += not wrong & {"rule", "cause"}
        counts[group][MISLEADING] += MISLEADING in wrong
    return counts


class Kills(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mutation matrix: by fault and case, in the order of the catalogue."""

    found: Mapping[str, Mapping[str, Kill]]
    software: Mapping[str, str]  # torch, torchao

    @property
    def scores(self) -> dict[FaultClass, Counter[str]]:
        """Return a table of how many headlines of every class are right."""
        kills = ((all_faults()[name].group, kill) for name, cases in self.found.items() for kill in cases.values())
        return scores((group, kill.misnamed) for group, kill in kills if kill.misnamed is not None)

    def by_check(self, check: str) -> dict[str, tuple[str, ...]]:
        """Return the faults that a check found in some case, each with the rules of the check that were broken."""
        faults: dict[str, tuple[str, ...]] = {}
        for fault, cases in self.found.items():
            broken = {rule for kill in cases.values() for rule in kill.rules if check_of(rule) == check}
            if broken:
                faults[fault] = tuple(sorted(broken))
        return faults


def catalogue(project: Project, words: Sequence[str]) -> list[Block]:
    """Return the injected faults by the check that finds them; `words`: names of checks, or of classes of faults.

    Raises `Damaged`, and HarnessError for another word.
    """
    kills = read_kills(project.root) or read_kills(project.shipped)
    if unknown := [word for word in words if word not in (*FAULT_CLASSES, *_CHECKS)]:
        fix = suggestion(unknown[0], (*_CHECKS, *FAULT_CLASSES))
        raise HarnessError("no check and no class of faults.", where=unknown[0], fix=fix)
    classes = [
        Section(title=f"{name}: {FAULT_CLASSES[name].title}", blocks=(_of_class(name),))
        for name in FAULT_CLASSES
        if name in words
    ]
    checks = () if kills is None else (name for name in _CHECKS if name in words or not words)
    return [*classes, *(_of_check(kills, name) for name in checks if kills is not None)]


def _of_class(group: FaultClass) -> Table:
    faults = (fault for fault in all_faults().values() if fault.group == group)
    return Table(rows=tuple((fault.name, fault.title) for fault in faults))


def _of_check(kills: Kills, check: str) -> Section:
    found = kills.by_check(check)
    rows = tuple((name, all_faults()[name].title, ", ".join(rules)) for name, rules in found.items())
    return Section(title=f"{check}: finds {counted(len(rows), 'fault')}", blocks=(Table(rows=rows),))


def kills_path(root: Path) -> Path:
    return root / "golden" / "evidence" / "kills.json"


def read_kills(root: Path) -> Kills | None:
    """Return what was recorded; None if nothing was. Raises `Damaged`."""
    try:
        return read_sealed(kills_path(root), Kills, remake="remove it.")
    except Missing:
        return None


def write_kills(root: Path, kills: Kills) -> Path:
    return write_sealed(kills_path(root), kills)
