"""What changes when a golden is replaced: the two, and whether measured noise explains their distance."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from harness.evidence.golden import (
    Golden,
    GoldenDamaged,
    GoldenKey,
    GoldenMissing,
    compare_goldens,
    list_goldens,
    load_golden,
)
from harness.evidence.tolerance import ToleranceMissing, ToleranceUnfounded, tolerance_for
from harness.matrix.caseid import parse_case_id


class GoldenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new golden and the one that it replaces. `old_error` says why an existing file could not be read."""

    new: Golden
    old: Golden | None
    old_error: str = ""

    @property
    def kind(self) -> Literal["new", "changed", "unchanged"]:
        """Whether a number or the data changed; who made the golden and why does not count."""
        if self.old is None:
            return "new"
        old, new = ((each.losses, each.grad_norms, each.data_digest) for each in (self.old, self.new))
        return "unchanged" if old == new else "changed"

    @property
    def other_data(self) -> bool:
        """True when the two were not trained on the same data and initial weights."""
        return self.old is not None and self.old.data_digest != self.new.data_digest


class LargestChange(msgspec.Struct, frozen=True, kw_only=True):
    """The step of a golden whose loss changed most for what is allowed there, in nats."""

    step: int
    change: float
    allowed: float

    @property
    def explains(self) -> bool:
        """True when no loss changed more than noise does."""
        return self.change <= self.allowed


def largest_change(change: GoldenChange, root: Path) -> LargestChange | None:
    """How the change compares with the tolerance of the reference; None where nothing was measured or is comparable."""
    if change.old is None or change.old.data_digest != change.new.data_digest:
        return None
    try:
        allowed = tolerance_for(parse_case_id(change.new.case_id), root).per_step
    except (ToleranceMissing, ToleranceUnfounded):
        return None
    rows = [row for row in compare_goldens(change.old, change.new) if row.loss_change is not None]
    found = [
        LargestChange(step=row.step, change=abs(row.loss_change or 0.0), allowed=limit)
        for row, limit in zip(rows, allowed, strict=False)
    ]
    return max(found, key=lambda each: each.change / each.allowed, default=None)


def replaced(root: Path, new: Golden) -> GoldenChange:
    """The change when `new` replaces what is stored at `root`."""
    try:
        return GoldenChange(new=new, old=load_golden(root, new.hardware, new.family))
    except GoldenMissing:
        return GoldenChange(new=new, old=None)
    except GoldenDamaged as error:
        return GoldenChange(new=new, old=None, old_error=error.text)


def changes_between(old_root: Path, new_root: Path) -> tuple[tuple[GoldenChange, ...], tuple[GoldenKey, ...]]:
    """What became of the goldens of one root in another one: every golden that is there now, and those that are gone.

    Raises `GoldenDamaged` for one that is there now.
    """
    stored = list_goldens(new_root)
    gone = tuple(key for key in list_goldens(old_root) if key not in stored)
    return tuple(replaced(old_root, load_golden(new_root, key.hardware, key.family)) for key in stored), gone
