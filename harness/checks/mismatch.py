"""Mismatch: one value of one rank that is not what it must be, and how far off a number is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.checks.ranks import format_ranks
from harness.verdict import Finding, Verdict


def size_of_error(name: str, found: float, expected: float) -> float:
    """How far off a reported number is: nats for a loss, relative for a gradient norm (NaN if it must be 0)."""
    difference = abs(found - expected)
    if name == "loss":
        return difference
    return difference / abs(expected) if expected else math.nan


def same_number(found: float, expected: float) -> bool:
    """True for equal numbers, and for NaN on both sides."""
    return found == expected or (math.isnan(found) and math.isnan(expected))


def same_numbers(found: Sequence[float], expected: Sequence[float]) -> bool:
    """True for as many numbers, each the same."""
    return len(found) == len(expected) and all(map(same_number, found, expected))


class Mismatch(NamedTuple):
    """One wrong value. Mismatches sort by step and order of execution."""

    step: int
    order: int  # of execution on its rank
    rank: int
    module: str
    what: str  # the value that is wrong, or the rule that is broken
    expected: str
    found: str
    formula: str = ""  # which it contradicts; empty where it breaks a rule that no version may break

    @property
    def place(self) -> str:
        """Module, step and rank as text."""
        return f"{self.module} at step {self.step} on rank {self.rank}"

    def finding(self, check: str, message: str, verdict: Verdict = Verdict.INVARIANT) -> Finding:
        """The finding of `check` that points at this mismatch."""
        return Finding(
            check=check,
            message=message,
            verdict=verdict,
            step=self.step,
            rank=self.rank,
            module=self.module,
            expected=self.expected,
            found=self.found,
            formula=self.formula,
        )


def findings_by_rule(
    check: str, mismatches: Iterable[Mismatch], explain: Callable[[Mismatch], str] = lambda first: ""
) -> list[Finding]:
    """One finding for every rule that is broken: the first place, how many mismatches there are, and on which ranks.

    `explain` may say of the first one how it came about.
    """
    by_rule: dict[str, list[Mismatch]] = {}
    for mismatch in sorted(mismatches, key=lambda each: each[:3]):
        by_rule.setdefault(mismatch.what, []).append(mismatch)
    return [
        found[0].finding(
            check,
            f"{rule}: first in {found[0].place}; {len(found)} in total on {format_ranks(each.rank for each in found)}"
            + (f"; {why}" if (why := explain(found[0])) else ""),
        )
        for rule, found in by_rule.items()
    ]
