"""Mismatch: one value of one rank that is not what it must be, and how far off a number is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from harness.checks.rule import Rule
from harness.verdict import Finding, Value


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
    rule: Rule  # that is broken
    expected: str
    found: str
    operand: str = ""  # of the module, "weight in forward"
    values: tuple[tuple[str, Value], ...] = ()  # of the sentence of the rule

    @property
    def place(self) -> tuple[int, int, int, str]:
        """What it is sorted by."""
        return self[:4]

    def finding(self, suffix: str = "", notes: Iterable[str] = (), **values: Value) -> Finding:
        """The finding that points at this mismatch; `suffix` ends the sentence of the rule."""
        return self.rule.finding(
            step=self.step,
            rank=self.rank,
            module=self.module,
            operand=self.operand,
            expected=self.expected,
            found=self.found,
            suffix=suffix,
            notes=notes,
            values={**dict(self.values), **values},
        )


def first_place(mismatch: Mismatch) -> str:
    """The end of a sentence that says where a rule is broken first."""
    where = "for {operand} of" if mismatch.operand else "in"
    return f": first {where} {{module}} at step {{step}} on rank {{rank}}"


def findings_by_rule(
    mismatches: Iterable[Mismatch], explain: Callable[[Mismatch], str] = lambda first: ""
) -> list[Finding]:
    """One finding for every rule that is broken: the first place, how many mismatches there are, and on which ranks.

    `explain` may say of the first one how it came about.
    """
    by_rule: dict[tuple[object, ...], list[Mismatch]] = {}
    for mismatch in sorted(mismatches, key=lambda each: each[:3]):
        by_rule.setdefault((mismatch.rule.name, mismatch.values), []).append(mismatch)
    return [_finding(found, explain(found[0])) for found in by_rule.values()]


def _finding(mismatches: list[Mismatch], why: str) -> Finding:
    first, ranks = mismatches[0], {each.rank for each in mismatches}
    finding = first.finding(
        f"{first_place(first)}; {{total}} in total on {{ranks}}", [why] if why else [], total=len(mismatches)
    )
    return msgspec.structs.replace(finding, ranks=tuple(sorted(ranks)))
