"""Findings of many places and ranks, made into few: one for a rule that is broken, or for ranks that find the same."""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from harness.checks.rule import Rule
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value

T = TypeVar("T", bound=Hashable)


class Mismatch(NamedTuple):
    """One value of one rank that is not what it must be. Mismatches sort by step and order of execution."""

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
    for mismatch in sorted(mismatches, key=lambda mismatch: mismatch[:3]):
        by_rule.setdefault((mismatch.rule.name, mismatch.values), []).append(mismatch)
    return [_of_rule(group, explain(group[0])) for group in by_rule.values()]


def _of_rule(mismatches: list[Mismatch], why: str) -> Finding:
    first, ranks = mismatches[0], {mismatch.rank for mismatch in mismatches}
    suffix, notes = f"{first_place(first)}; {{total}} in total on {{ranks}}", [why] if why else []
    return replace(first.finding(suffix, notes, total=len(mismatches)), ranks=tuple(sorted(ranks)))


def traces_by_rank(run: Run) -> list[RankTrace]:
    """The traces sorted by rank, so that findings never depend on the order in which ranks returned."""
    return sorted(run.traces, key=lambda trace: trace.rank)


def group_ranks(run: Run, value_of: Callable[[RankTrace], T]) -> dict[T, list[int]]:
    groups: dict[T, list[int]] = {}
    for trace in traces_by_rank(run):
        groups.setdefault(value_of(trace), []).append(trace.rank)
    return groups


def merge_ranks(run: Run, findings_of: Callable[[RankTrace], Iterable[Finding]]) -> list[Finding]:
    """The findings of every rank. Ranks with the same findings share them: "... on ranks 0-3" ends each sentence."""
    return [
        replace(finding, says=f"{finding.says} on {{ranks}}", rank=ranks[0], ranks=tuple(ranks))
        for findings, ranks in group_ranks(run, lambda trace: tuple(findings_of(trace))).items()
        for finding in findings
    ]


def about_ranks(finding: Finding, ranks: Iterable[int], run: Run | None = None) -> Finding:
    """The finding about what these ranks have; about what every rank of `run` has, as one number, it names none."""
    shown = tuple(sorted(set(ranks)))
    everywhere = run is not None and len(shown) == len(run.traces)
    if everywhere and len(shown) > 1:
        return replace(finding, says=f"{finding.says}, on all ranks")
    if everywhere or not shown:
        return finding
    return replace(finding, says=f"{finding.says}, on {{ranks}}", rank=shown[0], ranks=shown)


def first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding by every rule with its values: of what is wrong in several steps, the first step."""
    first: dict[tuple[str, frozenset[tuple[str, Value]]], Finding] = {}
    for finding in findings:
        first.setdefault((finding.rule, frozenset(finding.values.items())), finding)
    return list(first.values())
