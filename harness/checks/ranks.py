"""Merging the same finding on 8 ranks into one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import msgspec

from harness.checks.rule import Rule
from harness.sentence import format_ranks
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value

T = TypeVar("T", bound=Hashable)


def traces_by_rank(run: Run) -> list[RankTrace]:
    """The traces sorted by rank, so that findings never depend on the order in which ranks returned."""
    return sorted(run.traces, key=lambda trace: trace.rank)


def group_ranks(run: Run, value_of: Callable[[RankTrace], T]) -> dict[T, list[int]]:
    """The ranks that recorded each value; values in the order of their lowest rank."""
    groups: dict[T, list[int]] = {}
    for trace in traces_by_rank(run):
        groups.setdefault(value_of(trace), []).append(trace.rank)
    return groups


def merge_ranks(run: Run, findings_of: Callable[[RankTrace], Iterable[Finding]]) -> list[Finding]:
    """The findings of every rank. Ranks with the same findings share them: "... on ranks 0-3" ends each sentence."""
    return [
        msgspec.structs.replace(finding, says=f"{finding.says} on {{ranks}}", rank=ranks[0], ranks=tuple(ranks))
        for findings, ranks in group_ranks(run, lambda trace: tuple(findings_of(trace))).items()
        for finding in findings
    ]


def first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding by every rule with its values: of what is wrong in several steps, the first step."""
    first: dict[tuple[str, frozenset[tuple[str, Value]]], Finding] = {}
    for finding in findings:
        first.setdefault((finding.rule, frozenset(finding.values.items())), finding)
    return list(first.values())


def missing_records(run: Run, rule: Rule, field: str) -> list[Finding]:
    """A finding by `rule` when a rank did not fill `field` of its trace, or when there is no trace at all."""
    ranks = [trace.rank for trace in run.traces if getattr(trace, field) is None]
    if run.traces and not ranks:
        return []
    what = field.replace("_", " ")
    where = format_ranks(ranks) if ranks else "any rank"
    return [rule.finding(ranks=ranks, record=what, where=where, expected=f"{what} of every rank")]
