"""Goldens that change, as text: each one with its numbers, and all of them for the message of a commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from harness.environment import changed_facts
from harness.evidence.golden import GoldenChange, GoldenKey, LargestChange, Provenance, compare_goldens, largest_change
from harness.plural import counted
from harness.report.wording import aligned


def change_text(change: GoldenChange, root: Path) -> str:
    """Old and new losses of one family, and whether noise explains their distance. `root`: of the tolerances."""
    lines = [f"{change.new.family} on {change.new.hardware}: {_summary(change, root)}"]
    if change.old is not None and change.kind == "changed":
        lines += _machines(change.old.provenance, change.new.provenance)
    if change.old_error:
        lines.append(f"  replaces a damaged golden: {change.old_error}")
    lines.append("  step     old loss     new loss       change     old norm     new norm")
    for row in compare_goldens(change.old, change.new):
        numbers = (row.old_loss, row.new_loss, row.loss_change, row.old_grad_norm, row.new_grad_norm)
        lines.append(f"  {row.step:>4} " + " ".join(_number(value) for value in numbers))
    return "\n".join(lines) + "\n"


def review_text(changes: Sequence[GoldenChange], root: Path, *, gone: Sequence[GoldenKey] = ()) -> str:
    """What a reviewer must know: the reasons, then every golden with its worst change. Empty where nothing changed."""
    changed = [change for change in changes if change.kind != "unchanged"]
    if not changed and not gone:
        return ""
    reasons = list(dict.fromkeys(change.new.provenance.reason for change in changed)) or ["goldens are removed"]
    rows = [(change.new.family, change.new.hardware, _summary(change, root)) for change in changed]
    rows += [(key.family, key.hardware, "removed") for key in gone]
    software = dict.fromkeys(line for change in changed for line in _software(change))
    head = f"{counted(len(rows), 'golden')} changed: {'; '.join(reasons)}"
    return "\n".join([head, "", aligned(rows), *(["", *software] if software else [])]) + "\n"


def _summary(change: GoldenChange, root: Path) -> str:
    if change.kind != "changed":
        return change.kind
    if change.other_data:
        return "changed, other data"
    return f"changed{_noise(largest_change(change, root))}"


def _noise(found: LargestChange | None) -> str:
    if found is None:
        return ", and no noise was measured for it"
    words = "within noise" if found.explains else "beyond noise"
    return f", {words}: {found.change:.1e} of {found.allowed:.1e} nats allowed at step {found.step}"


def _machines(old: Provenance, new: Provenance) -> list[str]:
    """What computed the old and the new one, where it is known and differs."""
    unknown = "none" if old.cpu else "not recorded"
    facts = (("CPU", old.cpu, new.cpu), ("limits", old.limits, new.limits))
    return [f"  {name}: {before or unknown} -> {now or 'none'}" for name, before, now in facts if before != now]


def _software(change: GoldenChange) -> Sequence[str]:
    """The versions that differ, one a line."""
    if change.old is None:
        return ()
    old, new = change.old.provenance.software, change.new.provenance.software
    return changed_facts(old, new, sorted({*old, *new}))


def _number(value: float | None) -> str:
    if value is None:
        return f"{'-':>12}"
    return f"{value:>12.6f}" if math.isfinite(value) else f"{value!s:>12}"
