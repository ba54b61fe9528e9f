"""Which rules found which planted fault: the proof that checks have teeth, as `dev mutate --record` measured it.

Sealed JSON in the package and in a project of one's own. The reference of the checks (`docs/checks.md`) is made of it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.evidence.sealed import Missing, Sealed, read_sealed, write_sealed
from harness.plugins.faults.faults import all_faults
from harness.project import Project
from harness.report.evidence import Proofs
from harness.verdict import Verdict, check_of


class Kill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a case ended in which a fault was planted. `rules`: those that the clean case does not break, sorted.

    `misnamed`: what the first finding names and the fault is not; None where it is not listed where the fault is.
    """

    verdict: Verdict
    rules: tuple[str, ...]
    misnamed: tuple[str, ...] | None = None


class Kills(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mutation matrix: by fault and case, in the order of the catalogue."""

    found: Mapping[str, Mapping[str, Kill]]
    software: Mapping[str, str]  # torch, torchao

    @property
    def misnamed(self) -> Mapping[str, tuple[str, ...] | None]:
        """What the headline of every fault in every case misnames, by "fault in case"."""
        return {
            f"{name} in {case}": kill.misnamed for name, kills in self.found.items() for case, kill in kills.items()
        }

    def by_check(self, check: str) -> dict[str, tuple[str, ...]]:
        """Return the faults that a check found in some case, each with the rules of the check that were broken."""
        faults: dict[str, tuple[str, ...]] = {}
        for fault, cases in self.found.items():
            broken = {rule for kill in cases.values() for rule in kill.rules if check_of(rule) == check}
            if broken:
                faults[fault] = tuple(sorted(broken))
        return faults


def proofs(project: Project) -> Proofs:
    """Return the planted faults that a check finds, by its name: title and broken rules of each. Raises `Damaged`."""
    kills = read_kills(project.root) or read_kills(project.shipped)

    def found_by(check: str) -> dict[str, tuple[str, tuple[str, ...]]]:
        faults = kills.by_check(check) if kills is not None else {}
        return {name: (all_faults()[name].title, rules) for name, rules in faults.items()}

    return found_by


def kills_path(root: Path) -> Path:
    return root / "golden" / "evidence" / "kills.json"


def read_kills(root: Path) -> Kills | None:
    """Return what was recorded; None where nothing was. Raises `Damaged`."""
    try:
        return read_sealed(kills_path(root), Kills, remake="remove it.")
    except Missing:
        return None


def write_kills(root: Path, kills: Kills) -> Path:
    return write_sealed(kills_path(root), kills)
