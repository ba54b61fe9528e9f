"""The report for humans: a verdict table, a block for every case that is not good, and the totals.

Plain text for logs and CI; for terminals, the same table as a rich renderable with colours and wrapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from harness.checks.stacks import LAST_OUTPUT
from harness.report.wording import (
    aligned,
    failure_text,
    findings_texts,
    headline,
    outcome,
    retried,
    totals_text,
)
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_TRACEBACK_LINES = 25  # the last lines of a traceback; the JSON report has all of it
_COLUMNS = ("case", "verdict", "ranks", "wall s", "CPU s", "note")
_NUMBERS = (2, 3, 4)  # right-aligned columns
_COLOURS = {Verdict.PASSED: "green", Verdict.KNOWN: "cyan", Verdict.NOT_RUN: "yellow", Verdict.INFRA: "yellow"}


def text_report(run: RunResult) -> str:
    """Table, blocks and totals as plain text."""
    parts = [text_table(run.results), *bad_blocks(run.results)]
    return "\n\n".join([*filter(None, parts), totals_text(run)]) + "\n"


def text_table(results: Sequence[CaseResult]) -> str:
    """The verdict table; empty when there are no results."""
    if not results:
        return ""
    return aligned([_COLUMNS, *map(_row, results)], right=_NUMBERS)


def bad_blocks(results: Sequence[CaseResult]) -> list[str]:
    """A block for every case that is not good. A traceback that several of them have is in the first one's alone."""
    bad = [result for result in results if not result.verdict.good]
    first: dict[str, str] = {}
    for result in bad:
        for failure in result.run.failures if result.run else ():
            first.setdefault(_raised(failure), result.case_id)
    return [case_block(result, first) for result in bad]


def case_block(result: CaseResult, first: Mapping[str, str] = MappingProxyType({})) -> str:
    """The findings, tracebacks and retries of a case, and the command that reproduces it.

    `first`: the case whose block has a traceback. This block refers to it if it is that of another case.
    """
    lines = [
        f"{result.case_id} {outcome(result)}",
        *(indent(text, "  ") for text in findings_texts(result.findings)),
        *(indent(text, "  ") for text in _failure_texts(result, first)),
        *([f"  {retried(result)}"] if retried(result) else []),
        *([f"  reproduce: {result.command}"] if result.command else []),
    ]
    return "\n".join(lines)


def rich_table(results: Sequence[CaseResult]) -> Table:
    """The verdict table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if _COLUMNS.index(name) in _NUMBERS else "left", overflow="fold")
    for result in results:
        colour = _COLOURS.get(result.verdict, "red")
        cells = [Text(cell) for cell in _row(result)]  # Text, not str: brackets are no markup
        cells[1].stylize(colour)
        table.add_row(*cells)
    return table


def _row(result: CaseResult) -> tuple[str, ...]:
    times = (f"{result.seconds:.1f}", f"{result.cpu_s:.1f}")
    return (result.case_id, result.verdict.value, str(result.world_size), *times, headline(result))


def _failure_texts(result: CaseResult, first: Mapping[str, str]) -> list[str]:
    """How ranks failed, without consequences, each traceback once; only the end of a long traceback."""
    failures = result.run.failures if result.run else ()
    causes = [failure for failure in failures if not failure.consequence] or list(failures)
    told = [failure for failure in (_told(each, result.case_id, first) for each in causes) if failure.traceback]
    told.sort(key=lambda failure: (failure.traceback, failure.rank))
    return [_tail(failure_text(next(group))) for _, group in groupby(told, key=lambda failure: failure.traceback)]


def _told(failure: RankFailure, case_id: str, first: Mapping[str, str]) -> RankFailure:
    """The failure without what is told elsewhere: where ranks are stuck, and the traceback of another case."""
    _, mark, output = failure.traceback.partition(LAST_OUTPUT)
    if failure.kind == "stuck":
        return replace(failure, traceback=mark + output)
    other = first.get(_raised(failure), case_id)
    return failure if other == case_id else replace(failure, traceback=f"same traceback as {other}")


def _raised(failure: RankFailure) -> str:
    """The traceback without what the rank printed."""
    return failure.traceback.partition(LAST_OUTPUT)[0].rstrip()


def _tail(text: str) -> str:
    head, *lines = text.splitlines()
    if len(lines) <= SHOWN_TRACEBACK_LINES:
        return text
    omitted = len(lines) - SHOWN_TRACEBACK_LINES
    return "\n".join([head, f"({omitted} earlier lines)", *lines[-SHOWN_TRACEBACK_LINES:]])
