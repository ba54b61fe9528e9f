"""The goldens that change."""

import math
from collections.abc import Sequence
from pathlib import Path

from harness.evidence.golden import GoldenChange, GoldenKey, Provenance, compare_goldens, largest_change
from harness.report.sections import Block, Section, Table
from harness.text import changed_facts, counted


def golden_section(change: GoldenChange, root: Path) -> Section:
    """Old and new losses of one family, and whether noise explains their distance. `root`: of the tolerances."""
    rows = tuple(
        (
            str(row.step),
            *map(_number, (row.old_loss, row.new_loss, row.loss_change, row.old_grad_norm, row.new_grad_norm)),
        )
        for row in compare_goldens(change.old, change.new)
    )
    columns = ("step", "old loss", "new loss", "change", "old norm", "new norm")
    old = change.old if change.kind == "changed" else None
    return Section(
        title=f"{change.new.family} on {change.new.hardware}: {_summary(change, root)}",
        blocks=(
            *(() if old is None else _machines(old.provenance, change.new.provenance)),
            *([f"replaces a damaged golden: {change.old_error}"] if change.old_error else []),
            Table(columns=columns, rows=rows, right=tuple(range(len(columns)))),
        ),
    )


def review_sections(changes: Sequence[GoldenChange], root: Path, *, gone: Sequence[GoldenKey] = ()) -> list[Block]:
    """What a reviewer must know: the reasons, then every golden with its worst change. Empty where nothing changed."""
    changed = [change for change in changes if change.kind != "unchanged"]
    if not changed and not gone:
        return []
    reasons = list(dict.fromkeys(change.new.provenance.reason for change in changed)) or ["goldens are removed"]
    rows = [(change.new.family, change.new.hardware, _summary(change, root)) for change in changed]
    rows += [(key.family, key.hardware, "removed") for key in gone]
    old_and_new = [(change.old.provenance.software, change.new.provenance.software) for change in changed if change.old]
    software = dict.fromkeys(line for old, new in old_and_new for line in changed_facts(old, new, sorted({*old, *new})))
    return [
        f"{counted(len(rows), 'golden')} changed: {'; '.join(reasons)}",
        Table(rows=tuple(rows)),
        Section(blocks=tuple(software)),
    ]


def _summary(change: GoldenChange, root: Path) -> str:
    if change.kind != "changed":
        return change.kind
    if change.other_data:
        return "changed, other data"
    largest = largest_change(change, root)
    if largest is None:
        return "changed, and no noise was measured for it"
    words = "within noise" if largest.explains else "beyond noise"
    return f"changed, {words}: {largest.change:.1e} of {largest.allowed:.1e} nats allowed at step {largest.step}"


def _machines(old: Provenance, new: Provenance) -> list[str]:
    unknown = "none" if old.cpu else "not recorded"
    facts = (("CPU", old.cpu, new.cpu), ("limits", old.limits, new.limits))
    return [f"{name}: {before or unknown} -> {now or 'none'}" for name, before, now in facts if before != now]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6f}" if math.isfinite(value) else str(value)
