"""Sets of ranks in messages, and merging the same finding on 8 ranks into one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from typing import TypeVar

import msgspec

from harness.trace import RankTrace, Run
from harness.verdict import UNJUDGED, Finding

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
    """The findings of every rank. Ranks with the same findings share them: "... on ranks 0-3" ends each message."""
    return [
        msgspec.structs.replace(finding, message=f"{finding.message} on {format_ranks(ranks)}", rank=ranks[0])
        for findings, ranks in group_ranks(run, lambda trace: tuple(findings_of(trace))).items()
        for finding in findings
    ]


def first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding with every message: of what is wrong in several steps, the first step."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.message, finding)
    return list(first.values())


def missing_records(run: Run, check: str, field: str) -> list[Finding]:
    """A finding when a rank did not fill `field` of its trace, or when there is no trace at all."""
    ranks = [trace.rank for trace in run.traces if getattr(trace, field) is None]
    if run.traces and not ranks:
        return []
    what = field.replace("_", " ")
    message = f"{UNJUDGED}no record of {what} on {format_ranks(ranks) if ranks else 'any rank'}"
    return [Finding(check=check, message=message, rank=min(ranks, default=None), expected=f"{what} of every rank")]


def format_ranks(ranks: Iterable[int]) -> str:
    """The ranks as text: "rank 3", "ranks 0-3, 6"."""
    numbers = sorted(set(ranks))
    runs = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"
